"""A Hugging Face folder (config.json, safetensors in one file or sharded) as named arrays, without transformers.

Nothing is ever unpickled: a folder with only `pytorch_model.bin` is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # registers bfloat16 with numpy, which safetensors then returns
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..models.config import LlamaConfig, brief
from ..models.errors import CheckpointError
from ..models.layers import network_of
from ..models.plain_files import check_plain, read_object

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
MOST_SHARDS = 1024  # each is held open while a checkpoint is checked
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint:
    """A checked checkpoint. Opening it reads headers only; `tensor` reads one tensor at a time and keeps none."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError when anything the model needs is missing, damaged or of the wrong shape."""
        self.folder = folder
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder: give the path of a Hugging Face checkpoint folder")
        self.config = LlamaConfig.from_hf(read_json(folder / "config.json"))
        self._files = weight_files(folder)
        handles = {file: open_safetensors(file) for file in set(self._files.values())}
        for name, shape in network_of(self.config).tensors().items():
            self._check(name, shape, handles)

    def tensor(self, name: str) -> NDArray[Any]:
        """One tensor in its stored dtype. Raises CheckpointError when it holds NaN or infinity."""
        # Opened each time: a mapping that stays open keeps every page it ever read in this process's memory.
        array: NDArray[Any] = open_safetensors(self._files[name]).get_tensor(name)
        if not np.isfinite(array).all():
            raise CheckpointError(f"{self.folder}: tensor {name} holds NaN or infinity; the checkpoint is damaged")
        return array

    def _check(self, name: str, shape: tuple[int, ...], handles: Mapping[Path, Any]) -> None:
        file = self._files.get(name)
        if file is None or name not in handles[file].keys():  # noqa: SIM118 - a safetensors handle is no dict
            raise CheckpointError(f"{self.folder}: tensor {name} is missing; the checkpoint is incomplete")
        stored = handles[file].get_slice(name)
        if stored.get_dtype() not in DTYPES:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is {stored.get_dtype()}; use an fp32, fp16 or bf16 checkpoint"
            )
        if tuple(stored.get_shape()) != shape:
            raise CheckpointError(
                f"{self.folder}: tensor {name} has shape {tuple(stored.get_shape())}, config.json asks for {shape}"
            )


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, from the single file or from the sharded index."""
    if os.path.lexists(folder / INDEX):
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{folder / INDEX}: no weight_map; download the file again")
        names = set(weight_map.values()) if all(isinstance(file, str) for file in weight_map.values()) else set()
        if weight_map and not names:
            raise CheckpointError(f"{folder / INDEX}: weight_map must name a file for each tensor; download it again")
        if len(names) > MOST_SHARDS:
            raise CheckpointError(f"{folder / INDEX}: {len(names)} files, more than {MOST_SHARDS}; merge some of them")
        files = {name: inside(folder, name) for name in names}
        return {name: files[file] for name, file in weight_map.items()}
    if (folder / WEIGHTS).is_file():
        handle = open_safetensors(folder / WEIGHTS)
        return dict.fromkeys(handle.keys(), folder / WEIGHTS)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder} holds pickled weights, which can run code when opened: convert them to safetensors first"
        )
    raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}: the checkpoint is incomplete")


def inside(folder: Path, relative: str) -> Path:
    """A file of the folder; refuses a path that leaves it."""
    # The folder's own entries may be links (a hub cache is made of them); the name itself must not climb.
    if Path(relative).is_absolute() or ".." in Path(relative).parts:
        raise CheckpointError(f"{folder / INDEX}: {relative!r} leaves the checkpoint folder; refusing to read it")
    try:
        path = (folder / relative).resolve()
        there = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, no character of a path, or links in a circle
        raise CheckpointError(f"{folder / INDEX}: {brief(relative)} is no path ({error})") from error
    if not there:
        raise CheckpointError(f"{folder}: {relative[:200]} is missing; the checkpoint is incomplete")
    return path


def open_safetensors(file: Path) -> Any:
    """A handle that has read and checked the header: offsets that neither overlap nor leave the file."""
    try:
        check_plain(file)
        return safe_open(str(file), framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file ({error}); download it again") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError that names the file."""
    try:
        return read_object(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: is this a Hugging Face checkpoint folder?") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}; download it again") from error
