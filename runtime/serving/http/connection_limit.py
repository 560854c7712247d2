"""The limit of an HTTP server's connections, which depends on the limit of open files."""

from __future__ import annotations

import os
import sys

from ....models.errors import ConfigError

MAX_CONNECTIONS = 1024  # default limit; far more than the requests that run at a time
RESERVE = 16  # further connections, of which a new client gets one when all others have requests in progress
SPARE_FILES = 64  # files that the process may open later besides connections


def raise_file_limit(requested: int) -> int:
    """Raise the limit of open files as far as necessary and allowed for `requested` connections. Returns the number of
    connections that fit, at most `requested`; a smaller one is a warning. Raises ConfigError if none fits."""
    if requested < 1:
        raise ConfigError(f"--max-connections must be at least 1, not {requested}")
    if sys.platform == "win32":
        return requested
    import resource

    others = len(os.listdir("/dev/fd")) + SPARE_FILES + RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return requested
    if soft < others + requested:
        soft = others + requested if hard == resource.RLIM_INFINITY else min(hard, others + requested)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft <= others:
        raise ConfigError(f"{soft} open files are allowed, which leaves none for connections: raise ulimit -n")
    if soft - others >= requested:
        return requested
    print(
        f"draftwood: warning: room for {soft - others} connections instead of {requested}: raise the limit of open "
        "files (ulimit -n)",
        file=sys.stderr,
    )
    return soft - others
