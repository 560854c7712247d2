"""What a training of a head has collected so far, so that the same command goes on after an interruption."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...models.errors import ConfigError
from ...runtime.bundle.bundle import checksum
from ...runtime.bundle.cache import digest
from ..distillation.state_files import replace_file
from ..progress import Begin, remark
from .data import Examples
from .training import HeadTraining


class Collected:
    """The examples of batches that earlier runs of the same command have collected, in a folder beside the output."""

    def __init__(self, options: HeadTraining, prompts: Sequence[Sequence[int]], begin: Begin) -> None:
        asked = {name: str(value) for name, value in asdict(options).items() if name not in ("output", "epochs")}
        contents = [digest(options.target), digest(options.draft)]
        key = checksum({"options": asked, "models": contents, "prompts": [list(prompt) for prompt in prompts]})
        self.folder = options.output.with_name(f"{options.output.name}.state")
        self._key = key[:12]
        if found := len(list(self.folder.glob(f"{self._key}-*.safetensors"))):
            remark(begin, f"Going on with {self.folder}: it has the examples of {found} batches")

    def examples(self, name: str, generator: torch.Generator, collect: Callable[[], Examples]) -> Examples:
        """The stored examples of a batch, or those of `collect`, which are stored with the generator's state behind
        them. Raises ConfigError if the folder cannot be written or read."""
        file = self.folder / f"{self._key}-{name}.safetensors"
        if not file.is_file():
            found = collect()
            stored = {"hidden": found.hidden, "p_acc": found.p_acc, "generator": generator.get_state()}
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"{self.folder} cannot be written ({error.strerror}): choose another --output"
                ) from error
            replace_file(file, lambda partial: save_file(stored, partial))
            return found
        try:
            read = load_file(file)
            generator.set_state(read["generator"])
            return Examples(read["hidden"], read["p_acc"])
        except (OSError, SafetensorError, KeyError, RuntimeError, TypeError) as error:
            raise ConfigError(f"{file} cannot be used ({error}): remove it") from error

    def remove(self) -> None:
        """Remove the folder, when the head is written."""
        shutil.rmtree(self.folder, ignore_errors=True)
