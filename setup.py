"""Builds wheels: where Triton is installed, they carry the kernels of rounds as PTX; else a GPU's first use compiles
them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithKernels(build_py):
    def run(self) -> None:
        if not self.editable_mode and importlib.util.find_spec("triton") and importlib.util.find_spec("numpy"):
            folder = str(Path(__file__).parent / "src")
            command = [sys.executable, "-m", "draftwood.plugins.device_round.compile"]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": folder})
        super().run()


setup(cmdclass={"build_py": WithKernels})
