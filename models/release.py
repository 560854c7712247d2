"""The versions of this release and of other packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The version of the installed package; of a checkout that is not installed, "0+checkout"."""
    return version_of("draftwood") or "0+checkout"


def version_of(*packages: str) -> str | None:
    """The version of the first package that is installed."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None
