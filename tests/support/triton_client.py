"""Shared parts of the Triton tests: a repository with a correct and a failing model, and a client for both."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as grpc
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from draftwood.runtime import EngineError, SpeculativeConfig
from draftwood.runtime.serving.triton.contract import OPTIONAL_INPUTS, PROMPT, ModelSettings
from draftwood.runtime.serving.triton.repository import Placement, write_model
from draftwood.runtime.serving.triton.server import Distribution, TritonServer

OWN = SpeculativeConfig(budget="fixed")  # proposals that do not depend on how fast this machine is at the moment
MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "triton.yaml"
PLAIN, FAULTY, FAIR = "draftwood", "faulty", "fair"
SLOW, RAISES, DIES, BREAKS, ENDLESS = 1001, 1002, 1003, 1004, 1005  # seeds that make the faulty model misbehave
WAIT_SECONDS = 300.0
Refused = InferenceServerException
DTYPES = {"TYPE_STRING": np.object_, "TYPE_INT32": np.int32, "TYPE_FP32": np.float32, "TYPE_UINT64": np.uint64}
BEGUN = "DRAFTWOOD_TEST_BEGUN"  # a variable: the file of the prompts' last tokens, in the order in which texts begin
# The product's model, given logits processors that take long, fail, or end the process.
FAULTS = f"""

import os, time
from dataclasses import replace


class TritonPythonModel(TritonPythonModel):
    def initialize(self, args):
        super().initialize(args)
        generate = self._engine.generate

        def faulty(prompt, params, **options):
            if params.seed == {BREAKS}:
                self._llm.target.score = broken
            if params.seed in {(SLOW, RAISES, DIES, ENDLESS)}:
                last = self._llm.tokenizer.decode(prompt[-1:])
                params = replace(params, logits_processors=(misbehaving(params.seed, last),))
            return generate(prompt, params, **options)

        self._engine.generate = faulty


def broken(*_):
    raise RuntimeError("the engine is broken for good")


BEGUN = os.environ.get("{BEGUN}")


def misbehaving(seed, last):
    begun = []

    def process(tokens, logits):
        if BEGUN and not begun:
            with open(BEGUN, "a") as file:
                file.write(last + "\\n")
        begun.append(True)
        time.sleep(0.02 if seed == {ENDLESS} else 0.002)
        if seed == {RAISES} and len(tokens) > 20:
            raise RuntimeError("the engine failed after 20 tokens")
        if seed == {DIES} and len(tokens) > 20:
            os._exit(1)
        return logits

    return process
"""


def write_repository(bundle: Path, repository: Path) -> Path:
    """Models over one bundle: one as it is, in two instances; one that misbehaves and takes three requests; one
    that decodes a request at a time, which nobody has loaded."""
    write_model(bundle, repository, PLAIN, ModelSettings("", OWN), Placement(instances=2), copy_bundle=True)
    faulty, fair = ModelSettings("", OWN, max_running=2, max_waiting=1), ModelSettings("", OWN, max_running=1)
    for name, settings in ((FAULTY, faulty), (FAIR, fair)):
        folder = write_model(bundle, repository, name, settings, Placement(), copy_bundle=False)
        with (folder / "1" / "model.py").open("a", encoding="utf-8") as file:
            file.write(FAULTS)
    return repository


@contextmanager
def triton(bundle: Path, folder: Path, exit_timeout: int = 1) -> Iterator[TritonServer]:
    """A tritonserver with both models, or a skip that says why there is none."""
    try:
        Distribution.find()
    except EngineError as error:
        pytest.skip(str(error))
    with TritonServer(write_repository(bundle, folder), models=[PLAIN, FAULTY], exit_timeout=exit_timeout) as running:
        yield running


def tensor(name: str, array: NDArray[Any]) -> Any:
    """An input tensor of any name, shape and type."""
    made = grpc.InferInput(name, list(array.shape), grpc.np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def inputs(text: str, **settings: Any) -> list[Any]:
    """Input tensors of the contract's types: text_input and these."""
    types = {spec.name: DTYPES.get(spec.data_type, np.bool_) for spec in (PROMPT, *OPTIONAL_INPUTS)}
    made = []
    for name, value in {PROMPT.name: text, **settings}.items():
        items = value if isinstance(value, list) else [value]
        coded = [item.encode() if isinstance(item, str) else item for item in items]
        made.append(tensor(name, np.array([coded], types[name])))
    return made


class Answer(NamedTuple):
    """One response: output tensors as Python values, and whether it was the final one."""

    outputs: dict[str, Any]
    final: bool


class Call:
    """One request over gRPC, on a connection of its own; ending the `with` block cancels it unless it ended."""

    def __init__(
        self, address: str, model: str, tensors: Any, timeout: float | None = None, sequence: Any = 0, **parameters: Any
    ) -> None:
        self._client = grpc.InferenceServerClient(address)
        self._answers: queue.Queue[Any] = queue.Queue()
        self._ended = False
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))
        deadline = None if timeout is None else round(timeout * 1e6)
        options = {"request_id": "one", "sequence_id": sequence, "timeout": deadline, "parameters": parameters}
        self._client.async_stream_infer(model, tensors, enable_empty_final_response=True, **options)

    def next(self, wait: float = WAIT_SECONDS) -> Answer:
        """The next response. Raises queue.Empty when none comes, InferenceServerException for an error."""
        result, error = self._answers.get(timeout=wait)
        if error is not None:
            self._ended = True
            raise error
        response = result.get_response()
        names = [output.name for output in response.outputs]
        outputs = {name: value(result.as_numpy(name)) for name in names}
        assert response.id == "one"
        self._ended = response.parameters["triton_final_response"].bool_param
        return Answer(outputs, self._ended)

    def rest(self, wait: float = WAIT_SECONDS) -> list[Answer]:
        """All responses up to the final one; raises as `next` does."""
        answers = [self.next(wait)]
        while not answers[-1].final:
            answers.append(self.next(wait))
        return answers

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        requests = self._client._stream._request_queue
        # To cancel what has just ended, too, makes Triton 24.10 lose count of its requests: it can unload no more.
        self._client.stop_stream(cancel_requests=not self._ended)
        requests.put(None)  # the client leaves a thread waiting for further requests when it cancels
        self._client.close()


def stubs(server: TritonServer, model: str) -> list[int]:
    """The processes of a model's instances."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended
            if folder.name.isdigit() and os.getpgid(int(folder.name)) == server.pid:
                command = (folder / "cmdline").read_bytes().split(b"\0")
                if b"stub" in command[0] and f"/{model}/".encode() in command[1]:
                    found.append(int(folder.name))
    return found


def value(array: NDArray[Any]) -> Any:
    """The values of a tensor [1, 1] or [1, 1, n]."""
    items = [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
    return items[0] if array.ndim == 2 else items


def ask(server: TritonServer, model: str, tensors: list[Any], **parameters: Any) -> list[Answer]:
    """All responses to one request. Raises InferenceServerException."""
    with Call(server.grpc, model, tensors, **parameters) as call:
        return call.rest()


def post(server: TritonServer, path: str, body: Mapping[str, Any] | bytes) -> tuple[int, str]:
    """Status and text of an HTTP request to a model."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http}/v2/models/{path}", content)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metric(server: TritonServer, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    with urllib.request.urlopen(server.metrics, timeout=WAIT_SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    wanted = [f'{label}="{text}"' for label, text in labels.items()]
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith(name + "{") and all(w in line for w in wanted)
    )


def canary(server: TritonServer, model: str) -> bool:
    """Whether a model passes the liveness probe of the Kubernetes manifest."""
    yaml = pytest.importorskip("yaml")
    deployment = next(yaml.safe_load_all(MANIFEST.read_text()))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    *shell, script = container["livenessProbe"]["exec"]["command"]
    script = script.replace("localhost:8000", server.http).replace("models/draftwood", f"models/{model}")
    return subprocess.run([*shell, script]).returncode == 0
