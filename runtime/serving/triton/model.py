"""TritonModel: a Triton python-backend model over AsyncLLM. A model repository's `model.py` derives from it.

The model is decoupled: `execute` passes requests to an event loop in another thread and returns; responses are sent as
rounds end. Only that thread uses Triton's metrics, because two threads at a time crash the whole server (seen with
24.10).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any, ClassVar

from ....models.errors import ConfigError
from ....plugins.installation import lacking
from ...llm import LLM
from ...requests.async_llm import AsyncLLM
from ...requests.stream import to_exception
from ...sampling.params import SamplingParams
from ..collector import freeze_loaded
from ..places import Places
from .contract import ModelSettings
from .metrics import TritonMetrics

try:
    from .call import POLL_SECONDS, Call
except ModuleNotFoundError as error:
    raise ConfigError(f"the Python of Triton lacks {lacking(error)}") from error

WARM_UP = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


class TritonModel:
    """One instance of a model: one process with its own copy of the engines.

    backend: the module triton_python_backend_utils, which exists only inside Triton; model.py sets it.
    """

    backend: ClassVar[Any]

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the bundle and decode a few tokens, so that the model is warm when Triton calls it ready."""
        if args["model_instance_kind"] == "GPU":  # must be set before any library looks for devices
            os.environ["CUDA_VISIBLE_DEVICES"] = args["model_instance_device_id"]
        parameters = json.loads(args["model_config"])["parameters"]
        settings = ModelSettings.from_parameters({name: value["string_value"] for name, value in parameters.items()})
        bundle = Path(args["model_repository"]) / settings.bundle
        threads = settings.threads, settings.draft_threads
        self._llm = LLM(bundle, settings.speculative, *threads, settings.provider, settings.private_weights)
        self._llm.generate("0", WARM_UP)
        self._engine = AsyncLLM(
            self._llm,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            kv_cache_bytes=settings.kv_cache_bytes or None,
            prefix_cache_slots=settings.prefix_cache_slots,
            max_pause_ms=settings.max_pause_ms,
        )
        self._places = Places(2 * self._engine.max_requests)  # as `draftwood serve`: texts are read and written, too
        labels = {
            "model": args["model_name"],
            "version": args["model_version"],
            "instance": args["model_instance_name"],
        }
        self._metrics = TritonMetrics(self.backend.MetricFamily, labels)
        self._engine.metrics = self._metrics
        self._loop = asyncio.new_event_loop()
        self._unloading = Event()
        freeze_loaded()  # Triton gives every instance a process of its own
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Accept requests; each is answered through its own response sender."""
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._serve(request, monotonic()), self._loop)

    def is_ready(self) -> bool:
        """Whether the model can answer requests. Triton calls it for the model's readiness since python_backend's pull
        request 430 of 2026; older releases, such as 24.10, never do."""
        return self._engine.trouble is None

    def finalize(self) -> None:
        """Triton calls this to unload the model, after every request is answered."""
        self._unloading.set()
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._engine.close()
        self._llm.close()

    async def _serve(self, request: Any, arrived: float) -> None:
        """Serve one request. arrived: by time.monotonic(). A final response is sent after any error, too."""
        call = Call(request, arrived, self.backend, self._metrics)
        try:
            await call.answer(self._engine, self._places)
        except BaseException as error:  # any error: without a final response the client would wait for ever
            call.fail(to_exception(error))

    def _run(self) -> None:
        """The thread of the event loop. The loop continues with other requests after any exception."""
        while not self._unloading.is_set():
            try:
                self._loop.run_until_complete(self._watch())
            except BaseException as error:
                self.backend.Logger.log_error(f"the event loop was interrupted: {error!r}")
                sleep(POLL_SECONDS)

    async def _watch(self) -> None:
        """The event loop's main task: tells Triton the metrics until the model is unloaded."""
        while not self._unloading.is_set():
            self._metrics.publish(self._engine.num_running, self._engine.num_waiting, self.is_ready())
            await asyncio.sleep(POLL_SECONDS)
