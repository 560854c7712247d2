"""Closing: what is closed at the end of a `with` block."""

from __future__ import annotations

from typing import TypeVar

C = TypeVar("C", bound="Closing")


class Closing:
    def close(self) -> None:
        """May be called more than once."""
        raise NotImplementedError

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
