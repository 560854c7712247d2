"""The tensors of a Hugging Face folder: safetensors in one file or sharded, without transformers.

Nothing is ever unpickled: a folder with only `pytorch_model.bin` is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # also registers bfloat16 with numpy, for what safetensors returns
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ...models.errors import CheckpointError
from ...models.fields import brief
from ...models.plain_files import check_plain
from .json_file import read_json
from .source import Stored

DTYPES = ("F32", "F16", "BF16")
FLOAT8 = "F8_E4M3"
MOST_SHARDS = 1024
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Safetensors:
    """The TensorSource of a folder. Raises CheckpointError when the files are missing or damaged."""

    def __init__(self, folder: Path, files: Mapping[str, Path] | None = None) -> None:
        """files: the file of each tensor, by name; None finds the files of a model in the folder."""
        self._stored = dict[str, Stored]()
        self._files = weight_files(folder) if files is None else files
        for file in dict.fromkeys(self._files.values()):
            handle = open_safetensors(file)
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no dict
                if self._files.get(name) == file:
                    header = handle.get_slice(name)
                    dtype = header.get_dtype()
                    self._stored[name] = Stored(tuple(header.get_shape()), dtype, dtype in DTYPES)

    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._stored)

    def stored(self, name: str) -> Stored | None:
        return self._stored.get(name)

    def tensor(self, name: str) -> NDArray[Any]:
        """A tensor in its stored dtype, which may be any: a source over this one may dequantise it. float8 becomes
        `ml_dtypes.float8_e4m3fn`."""
        # The file is opened each time, because a mapping that stays open keeps every page that was read in memory.
        if self._stored[name].dtype == FLOAT8:  # safetensors asks numpy, which has no float8
            import torch

            tensor = open_safetensors(self._files[name], "pt").get_tensor(name)
            return np.asarray(tensor.view(torch.uint8).numpy()).view(ml_dtypes.float8_e4m3fn)
        array: NDArray[Any] = open_safetensors(self._files[name]).get_tensor(name)
        return array


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of a sharded checkpoint."""
    found = read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder / INDEX}: no weight_map; download the file again")
    if not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map must name a file for each tensor; download it again")
    if (files := len(set(found.values()))) > MOST_SHARDS:
        raise CheckpointError(f"{folder / INDEX}: {files} files, more than {MOST_SHARDS}; merge some of them")
    return found


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, from the single file or from the sharded index."""
    if os.path.lexists(folder / INDEX):
        names = weight_map(folder)
        files = {file: inside(folder, file) for file in set(names.values())}
        return {name: files[file] for name, file in names.items()}
    if (folder / WEIGHTS).is_file():
        handle = open_safetensors(folder / WEIGHTS)
        return dict.fromkeys(handle.keys(), folder / WEIGHTS)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder} holds pickled weights, which can run code when opened: convert them to safetensors first"
        )
    raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}: the checkpoint is incomplete")


def inside(folder: Path, relative: str) -> Path:
    """The path of a file in the folder. Raises CheckpointError for a name that leads out of the folder."""
    # Files of the folder may be links, as in a Hub cache. The name itself must not lead out of the folder.
    if Path(relative).is_absolute() or ".." in Path(relative).parts:
        raise CheckpointError(f"{folder / INDEX}: {relative!r} leaves the checkpoint folder; refusing to read it")
    try:
        path = (folder / relative).resolve()
        there = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, an invalid character, or circular links
        raise CheckpointError(f"{folder / INDEX}: {brief(relative)} is no path ({error})") from error
    if not there:
        raise CheckpointError(f"{folder}: {relative[:200]} is missing; the checkpoint is incomplete")
    return path


def open_safetensors(file: Path, framework: str = "numpy") -> Any:
    """Open a file and check its header: tensors neither overlap nor leave the file. Raises CheckpointError."""
    try:
        check_plain(file)
        return safe_open(str(file), framework=framework)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file ({error}); download it again") from error
