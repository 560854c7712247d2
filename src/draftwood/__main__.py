"""The command `draftwood`, and `python -m draftwood`."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    """Run one command; returns its exit code. The commands are imported here: this takes most of a second, and Ctrl-C
    meanwhile must be no traceback."""
    try:
        from .cli.main import main as run
    except KeyboardInterrupt:
        print("draftwood: interrupted", file=sys.stderr)
        return 130
    code = run()
    if "triton" not in sys.modules:  # whose binding complains of objects that are not collected
        gc.freeze()  # at its end Python would look through all that was imported, for up to a second
    return code


if __name__ == "__main__":
    sys.exit(main())
