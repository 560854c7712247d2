"""The tensors of a Hugging Face folder: safetensors in one file or sharded, without transformers.

Nothing is ever unpickled: a folder with only `pytorch_model.bin` is refused.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ...models.errors import CheckpointError
from ...models.fields import brief
from ...models.plain_files import check_plain
from .source import Stored, read_json

DTYPES = ("F32", "F16", "BF16")
FLOAT8 = "F8_E4M3"
NUMPY = {
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    **{f"{kind.upper()}{8 * size}": np.dtype(f"<{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    FLOAT8: np.dtype(ml_dtypes.float8_e4m3fn),
}
READ_AHEAD = 256 << 20  # bytes after a tensor, which the system reads meanwhile: most often the next ones
MAX_SHARDS = 1024
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Place(NamedTuple):
    """Where a file holds a tensor: its bytes from `start` to before `end`. version: of the file, see `version_of`."""

    file: Path
    version: tuple[int, int]
    start: int
    end: int


class Safetensors:
    """The TensorSource of a folder. Raises CheckpointError when the files are missing or damaged."""

    def __init__(self, folder: Path, files: Mapping[str, Path] | None = None) -> None:
        """files: the file of each tensor, by name; None finds the files of a model in the folder."""
        self._stored = dict[str, Stored]()
        self._places = dict[str, Place]()
        files = weight_files(folder) if files is None else files
        for file in dict.fromkeys(files.values()):
            open_safetensors(file)  # checks the header
            with file.open("rb") as opened:
                version = version_of(opened.fileno())
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
            header.pop("__metadata__", None)  # no tensor, whatever an index says
            for name, entry in header.items():
                if files.get(name) == file:
                    start, end = (8 + length + offset for offset in entry["data_offsets"])
                    self._places[name] = Place(file, version, start, end)
                    self._stored[name] = Stored(tuple(entry["shape"]), entry["dtype"], entry["dtype"] in DTYPES)

    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def stored(self, name: str) -> Stored | None:
        return self._stored.get(name)

    def tensor(self, name: str) -> NDArray[Any]:
        """A tensor in its stored dtype, which may be any: a source over this one may dequantise it. It is a part of the
        mapped file, and cannot be written to."""
        shape, dtype, _ = self._stored[name]
        if dtype not in NUMPY:
            raise CheckpointError(f"{self._places[name].file}: tensor {name} is {dtype}, which numpy does not know")
        # Mapped each time, because a mapping that stays keeps every page that was read in memory.
        array = mapped(self._places[name]).view(NUMPY[dtype]).reshape(shape)
        return np.require(array, requirements=["ALIGNED"])


def version_of(file: int) -> tuple[int, int]:
    """The size of an open file, and when it was last written: other ones mean that it has changed."""
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def mapped(place: Place) -> NDArray[np.uint8]:
    """Bytes of a file, which are read when they are needed. Raises CheckpointError."""
    _, _, start, end = place
    first = start - start % mmap.ALLOCATIONGRANULARITY
    if start == end:
        return np.empty(0, np.uint8)
    try:
        check_plain(place.file)
        with place.file.open("rb") as file:
            if version_of(file.fileno()) != place.version:
                raise ValueError("it has changed")
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), start, end - start + READ_AHEAD, os.POSIX_FADV_WILLNEED)
            mapping = mmap.mmap(file.fileno(), end - first, access=mmap.ACCESS_READ, offset=first)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{place.file} cannot be read any more ({error}): build again, and leave it alone"
        ) from error
    return np.frombuffer(mapping, np.uint8, end - start, start - first)


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of a sharded checkpoint."""
    found = read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder / INDEX}: no weight_map; download the file again")
    if not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map must name a file for each tensor; download it again")
    if (files := len(set(found.values()))) > MAX_SHARDS:
        raise CheckpointError(f"{folder / INDEX}: {files} files, more than {MAX_SHARDS}; merge some of them")
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


def open_safetensors(file: Path) -> Any:
    """Open a file and check its header: tensors neither overlap nor leave the file. Raises CheckpointError."""
    try:
        check_plain(file)
        return safe_open(str(file), framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file ({error}); download it again") from error
