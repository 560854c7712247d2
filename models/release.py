"""The version of this release."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The version of the installed package; of a checkout that is not installed, "0+checkout"."""
    try:
        return version("draftwood")
    except PackageNotFoundError:
        return "0+checkout"
