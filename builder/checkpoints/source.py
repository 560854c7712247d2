"""TensorSource: the stored tensors of a model by the names that Hugging Face gives them, whatever file holds them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray


class Stored(NamedTuple):
    """A tensor as its file describes it. dtype: the name that the file has for it. is_read: whether `tensor` can."""

    shape: tuple[int, ...]
    dtype: str
    is_read: bool = True


class TensorSource(Protocol):
    """Reads headers when it is opened, and one tensor at a time after that; keeps none. A source may stand on another
    one, whose tensors it renames, splits, adds to or dequantises."""

    def stored(self, name: str) -> Stored | None:
        """What the headers say of a tensor; None where there is no such tensor. Raises CheckpointError."""

    def tensor(self, name: str) -> NDArray[Any]:
        """The tensor, fp32, fp16 or bf16. Raises CheckpointError."""
