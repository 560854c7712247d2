"""BundleWatch: whether the files of a bundle are still those that were opened."""

from __future__ import annotations

import logging
from time import monotonic

from ..models.errors import BundleError
from .bundle import EngineBundle, stamp

LOOK_SECONDS = 2.0  # between two looks: a `stat` of each file
log = logging.getLogger("draftwood.bundle")


class BundleWatch:
    """Looks at a bundle's files now and then, as somebody asks for `trouble`.

    A bundle is only ever replaced by renaming, as a build does: what was opened stays as it was, and the next start
    serves the new one. A file that is written to or cut off where it lies changes under the engines that have it in
    their memory: they compute from whatever is there, and reading beyond its end ends the process. A bundle that was
    opened with private copies of its weights is beyond that.
    """

    def __init__(self, bundle: EngineBundle) -> None:
        self._bundle = bundle
        self._looked = -LOOK_SECONDS
        self._trouble: str | None = None
        self._told: set[str] = set()

    @property
    def trouble(self) -> str | None:
        """Why texts of these engines cannot be relied upon any more; None while nobody wrote to their files."""
        now = monotonic()
        if self._trouble is None and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._look()
        return self._trouble

    def _look(self) -> None:
        for name, before in self._bundle.stamps.items():
            try:
                found = stamp(self._bundle.folder / name)
            except BundleError:  # gone, or something else by now
                found = None
            if found == before or name in self._told:
                continue
            in_place = found is not None and (found.device, found.inode) == (before.device, before.inode)
            if in_place and not self._bundle.private:
                self._trouble = (
                    f"changed: {name} was written to while it is served: put a whole bundle in its place by renaming, "
                    "and start again (--private-weights serves from a copy in memory)"
                )
                log.error("%s: %s", self._bundle.folder, self._trouble)
                return
            if not self._told:
                log.warning("%s was replaced: start again to serve the new one", self._bundle.folder)
            self._told.add(name)
