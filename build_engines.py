"""Compile a draft and a target LLaMA into an engine bundle; the same command as `draftwood build`.

python build_engines.py --target models/demo/target --draft models/demo/draft --output bundles/demo
"""

import sys

from draftwood.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["build", *sys.argv[1:]]))
