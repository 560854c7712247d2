"""python -m draftwood: the same as the command `draftwood`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
