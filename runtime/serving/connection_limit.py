"""How many connections an HTTP server may have, and the limit of open files behind it."""

from __future__ import annotations

import os
import sys

from ...models.errors import ConfigError

MAX_CONNECTIONS = 1024  # unless told otherwise; far above what is ever served at a time
RESERVE = 16  # further ones, for questions about the server's state
SPARE_FILES = 64  # that the process may open later, for other things than connections


def room_for(wanted: int) -> int:
    """How many of `wanted` connections fit under the limit of open files, which is raised as far as this is allowed.

    Raises ConfigError when that is none.
    """
    if wanted < 1:
        raise ConfigError(f"--max-connections must be at least 1, not {wanted}")
    if sys.platform == "win32":
        return wanted
    import resource

    others = len(os.listdir("/dev/fd")) + SPARE_FILES + RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < others + wanted:
        soft = others + wanted if hard == resource.RLIM_INFINITY else min(hard, others + wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft <= others:
        raise ConfigError(f"{soft} open files are allowed, which leaves none for connections: raise ulimit -n")
    return min(wanted, soft - others)
