"""BundleWatch: detects changes of a bundle's files after they were opened."""

from __future__ import annotations

import logging
from time import monotonic

from ...models.errors import BundleError
from .bundle import EngineBundle, stamp

LOOK_SECONDS = 2.0  # least time between two checks, each a `stat` of every file
log = logging.getLogger("draftwood.bundle")


class BundleWatch:
    """Checks a bundle's files when `trouble` is read, at most every LOOK_SECONDS.

    A build replaces a bundle by renaming: the opened files stay unchanged, and the next start uses the new ones. If a
    file is instead written to or truncated in place, engines that have mapped it into memory compute from changed data,
    and a read beyond the end kills the process. A bundle that was opened with private copies of its weights is not
    affected, nor is one whose engines map no file.
    """

    def __init__(self, bundle: EngineBundle) -> None:
        self._bundle = bundle
        self._looked = -LOOK_SECONDS
        self._trouble: str | None = None
        self._told: set[str] = set()

    @property
    def trouble(self) -> str | None:
        """The reason why the texts of these engines are no longer reliable; None as long as no file was written to."""
        now = monotonic()
        if self._trouble is None and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._look()
        return self._trouble

    def _look(self) -> None:
        for name, before in self._bundle.stamps.items():
            try:
                found = stamp(self._bundle.folder / name)
            except BundleError:  # the file is gone, or no longer a plain file
                found = None
            if found == before or name in self._told:
                continue
            in_place = found is not None and (found.device, found.inode) == (before.device, before.inode)
            if in_place and self._bundle.mapped:
                self._trouble = (
                    f"changed: {name} was written to while it is served: put a whole bundle in its place by renaming, "
                    "and start again (--private-weights serves from a copy in memory)"
                )
                log.error("%s: %s", self._bundle.folder, self._trouble)
                return
            if not self._told:
                log.warning("%s was replaced: start again to serve the new one", self._bundle.folder)
            self._told.add(name)
