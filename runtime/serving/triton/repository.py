"""write_model: an engine bundle as a model in a Triton Inference Server model repository."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from ....models.errors import ConfigError
from ....models.printable import shell_word
from ...bundle.bundle import EngineBundle
from ...bundle.fit import fitted
from ...bundle.staging import move_into_place, sibling
from ...engines.backends import BACKENDS, GRAPH
from .contract import OPTIONAL_INPUTS, OUTPUTS, PROMPT, ModelSettings, TensorSpec

CONFIG = "config.pbtxt"
HEADER = "# Written by `draftwood triton`, which replaces this folder when it is run again."
MODEL = '''"""The model's code is draftwood's; what differs from model to model are the parameters in config.pbtxt."""

import triton_python_backend_utils as pb_utils

from draftwood.runtime.serving.triton.model import TritonModel


class TritonPythonModel(TritonModel):
    backend = pb_utils
'''
README = """# {name}

A draftwood bundle in Triton Inference Server: a decoupled python-backend model with the tensor names of
TensorRT-LLM. The bundle is {bundle}.

If the extra `triton` is installed, start the model by adding `--run` to the command that wrote it. Otherwise use any
tritonserver whose Python has draftwood installed (in explicit mode, so that the model can be loaded again if its
process dies)

    tritonserver --model-repository={repository} {options}

or in NVIDIA's container, with draftwood's wheel in ./dist

    docker run --rm --shm-size=1g{docker_gpus} -p 8000:8000 -p 8001:8001 -p 8002:8002 \\
      -v {mounted} -v $PWD/dist:/dist:ro{docker_bundle} \\
      nvcr.io/nvidia/tritonserver:24.12-py3 \\
      bash -c 'pip install "$(ls /dist/draftwood-*.whl)[{extras}]" && \\
               exec tritonserver --model-repository=/models \\
               {options}'

Send a request:

    curl -d '{{"text_input": "def main():", "max_tokens": 32, "exclude_input_in_output": true}}' \\
      localhost:8000/v2/models/{name}/generate
    curl -N -d '{{"text_input": "def main():", "max_tokens": 32, "stream": true}}' \\
      localhost:8000/v2/models/{name}/generate_stream

If several clients share the model, each should name itself, so that the scheduler takes them in turn: "client": "me"
in the body, or the request parameter `client` over gRPC. Without a name the sequence id identifies the client.
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """`instances` of a model on each of `gpus`, or on the CPU if it is empty. Each instance has its own engines."""

    instances: int = 1
    gpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise ConfigError(f"instances must be at least 1, not {self.instances}")
        if len(set(self.gpus)) != len(self.gpus) or min(self.gpus, default=0) < 0:
            raise ConfigError(f"gpus must be the numbers of different devices, not {self.gpus}")


def write_model(
    bundle: Path, repository: Path, name: str, settings: ModelSettings, placement: Placement, copy_bundle: bool
) -> Path:
    """Write the model `name` into a repository and return its folder; an older model is replaced atomically.

    settings: their `bundle` is ignored; the model refers to `bundle` by its absolute path, or to a copy in the model's
    folder. Raises BundleError for a damaged bundle, ConfigError for an invalid name, for a path that is no UTF-8, for
    speculation that is too large for the bundle, and for a provider or private weights that its engines do not have.
    """
    opened = EngineBundle.open(bundle, settings.private_weights)
    for role in opened.manifest.engines:
        opened.check_provider(role, settings.provider)
    if settings.draft_threads:
        opened.check_draft()
    if settings.speculative is not None:
        fitted(settings.speculative, opened)
    folder = repository.resolve() / name
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ConfigError(f"the model's name must be made of letters, digits, '_', '-' and '.', not {name!r}")
    if folder.exists() and not written_here(folder):
        raise ConfigError(
            f"{folder} exists and was not written by draftwood: choose another name, or remove it yourself"
        )
    staging = sibling(folder, "partial")
    try:
        (staging / "1").mkdir(parents=True)
        (staging / "1" / "model.py").write_text(MODEL, encoding="utf-8")
        if copy_bundle:
            opened.copy_to(staging / "bundle")
        placed = replace(settings, bundle="bundle" if copy_bundle else str(bundle.resolve()))
        (staging / CONFIG).write_text(config_pbtxt(name, placed, placement), encoding="utf-8")
        (staging / "README.md").write_text(readme(opened, folder, placed, placement), encoding="utf-8")
        move_into_place(staging, folder)
    except OSError as error:
        raise ConfigError(f"cannot write {folder} ({error.strerror}): choose another folder") from error
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the model's files name {bundle.resolve()} and {repository.resolve()}, and are UTF-8: rename the folder "
            "that is not, or copy the bundle (--copy-bundle)"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def written_here(folder: Path) -> bool:
    config = folder / CONFIG
    return config.is_file() and config.read_text(encoding="utf-8", errors="replace").startswith(HEADER)


def config_pbtxt(name: str, settings: ModelSettings, placement: Placement) -> str:
    """The complete configuration of the model, in protobuf's text format."""
    parameters = settings.to_parameters() | {"FORCE_CPU_ONLY_INPUT_TENSORS": "yes"}
    count = f"count: {placement.instances}"
    groups = [f"{{ kind: KIND_GPU {count} gpus: [ {gpu} ] }}" for gpu in placement.gpus]
    lines = [
        HEADER,
        f"name: {quoted(name)}",
        'backend: "python"',
        "max_batch_size: 1",  # TensorRT-LLM's clients send a batch axis; a request has one prompt
        "model_transaction_policy { decoupled: true }",
        *block("input", [tensor(PROMPT), *(tensor(spec, " optional: true") for spec in OPTIONAL_INPUTS)]),
        *block("output", [tensor(spec) for spec in OUTPUTS]),
        *block("instance_group", groups or [f"{{ kind: KIND_CPU {count} }}"]),
        *(
            f"parameters {{ key: {quoted(key)} value {{ string_value: {quoted(value)} }} }}"
            for key, value in parameters.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def block(name: str, items: list[str]) -> list[str]:
    return [f"{name} [", *(f"  {item}," for item in items[:-1]), f"  {items[-1]}", "]"]


def tensor(spec: TensorSpec, more: str = "") -> str:
    dims = ", ".join(map(str, spec.dims))
    return f"{{ name: {quoted(spec.name)} data_type: {spec.data_type} dims: [ {dims} ]{more} }}"


def quoted(text: str) -> str:
    """A string of protobuf's text format, whose escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False)


def readme(opened: EngineBundle, folder: Path, settings: ModelSettings, placement: Placement) -> str:
    """The README of the model's folder: how to start the model."""
    bundle, copied = opened.folder.resolve(), settings.bundle == "bundle"
    on_onnxruntime = "gpu" if settings.provider == "cuda" else "onnxruntime"
    extras = {
        on_onnxruntime if BACKENDS[spec.backend].file == GRAPH else spec.plan.package if spec.plan else spec.backend
        for spec in opened.manifest.engines.values()
    }
    devices = ",".join(map(str, placement.gpus))
    return README.format(
        name=folder.name,
        repository=shell_word(folder.parent),
        mounted=shell_word(f"{folder.parent}:/models:ro"),
        bundle="in `bundle/` beside this file" if copied else f"`{bundle}`, which must stay there",
        options=f"--disable-auto-complete-config --model-control-mode=explicit --load-model={folder.name}",
        docker_gpus=f""" --gpus '"device={devices}"'""" if placement.gpus else "",
        docker_bundle="" if copied else f" -v {shell_word(f'{bundle}:{bundle}:ro')}",
        extras=",".join(sorted(extras)),
    )
