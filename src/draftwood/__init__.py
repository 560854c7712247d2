"""Draftwood's public names: those of `draftwood.runtime`, each loaded at its first use, and the version."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime import *  # noqa: F403

    __version__: str


def __getattr__(name: str) -> Any:
    """Raises AttributeError for a name that is not public."""
    if name == "__version__":
        from .models.release import own_version

        value: Any = own_version()
    else:
        runtime = import_module(f"{__name__}.runtime")  # `from . import` would ask this function

        names = [*runtime.__all__, "__version__"]
        if name != "__all__" and name not in names:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = names if name == "__all__" else getattr(runtime, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | {*__getattr__("__all__")})
