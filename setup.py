"""Builds wheels: where Triton is installed, they carry the kernels of rounds as PTX; else a GPU's first use compiles
them. Where there is a C compiler for x86-64, they carry the native kernels; else their first use compiles them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


def run_module(name: str, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "src")}
    subprocess.run([sys.executable, "-m", f"draftwood.plugins.{name}", *arguments], check=True, env=environment)


class WithKernels(build_py):
    def run(self) -> None:
        if not self.editable_mode and importlib.util.find_spec("triton") and importlib.util.find_spec("numpy"):
            run_module("device_round.compile")
        super().run()
        if not self.editable_mode:  # not into the checkout, which would go on with them when its C has changed
            run_module("native.compile", str(Path(self.build_lib, "draftwood", "plugins", "native", "kernels")))


class ForPlatform(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """For the releases of glibc that have what the kernels use; for any machine without kernels."""
        built = Path(self.get_finalized_command("build_py").build_lib)
        carried = b"".join(file.read_bytes() for file in built.rglob("llama-*.so"))
        if not carried:
            return super().get_tag()
        self.root_is_pure = False
        newest = max(map(int, re.findall(rb"GLIBC_2\.(\d+)", carried)))
        return "py3", "none", f"manylinux_2_{newest}_x86_64"


setup(cmdclass={"build_py": WithKernels, "bdist_wheel": ForPlatform})
