"""A draftwood worker for NVIDIA Dynamo: token ids in, the tokens of one round per chunk out.

    python worker.py BUNDLE --model CHECKPOINT_FOLDER [--served-model-name NAME] [--discovery-backend file]

Dynamo's front end tokenizes, applies the chat template of CHECKPOINT_FOLDER, and turns tokens into text. When a worker
dies, it sends what the worker had answered to another one as part of the prompt (`--migration-limit`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any

from dynamo.common.backend import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown

from draftwood import SamplingParams
from draftwood.models.errors import ConfigError, DraftwoodError, RequestError
from draftwood.runtime.decoding.scheduler import MAX_RUNNING
from draftwood.runtime.requests.async_llm import MAX_WAITING, AsyncLLM, ShutdownError

SERVED = {field.name for field in fields(SamplingParams)}
HIDDEN = "stop_token_ids_hidden"  # the front end's name for the tokens that end a text by themselves


class DraftwoodEngine(LLMEngine):
    """AsyncLLM behind Dynamo's engine interface."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._engine: AsyncLLM | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DraftwoodEngine, WorkerConfig]:
        args = arguments().parse_args(argv)
        # Dynamo turns away what is beyond, to another worker, and counts before we do; our own refusal would be a 500.
        os.environ.setdefault("DYN_ENGINE_REQUEST_LIMIT", str(args.max_running + args.max_waiting))
        os.environ.setdefault("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", "1")
        return cls(args), WorkerConfig(
            namespace=args.namespace,
            model_name=args.model,
            served_model_name=args.served_model_name,
            endpoint_types=args.endpoint_types,
            discovery_backend=args.discovery_backend,
            request_plane=args.request_plane,
            enable_kv_routing=False,
        )

    async def start(self, worker_id: int) -> EngineConfig:
        args = self._args
        limits = {"max_running": args.max_running, "max_waiting": args.max_waiting}
        self._engine = await asyncio.to_thread(AsyncLLM, args.bundle, threads=args.threads, **limits)
        registration = LlmRegistration(
            context_length=self._engine.llm.bundle.manifest.max_length, max_num_seqs=args.max_running
        )
        return EngineConfig(args.model, args.served_model_name, llm=registration)

    async def generate(self, request: GenerateRequest, context: Any) -> AsyncGenerator[GenerateChunk, None]:
        """Counting tokens is left to the front end: it alone knows which part of a prompt another worker wrote."""
        assert self._engine is not None, "generate() before start()"
        prompt = request["token_ids"]
        begin = self._engine.llm.tokenizer.encode("")  # the front end leaves it out of plain completions
        if prompt[: len(begin)] != begin:
            prompt = [*begin, *prompt]
        try:
            async for chunk in self._engine.generate(prompt, sampling_params(request), request_id=context.id()):
                answer = GenerateChunk(token_ids=chunk.token_ids, index=0)
                if chunk.finish_reason is not None:
                    answer["finish_reason"] = "cancelled" if chunk.finish_reason == "abort" else chunk.finish_reason
                yield answer
        except ShutdownError as error:
            raise EngineShutdown(str(error)) from error
        except (RequestError, ConfigError) as error:
            raise InvalidArgument(str(error)) from error
        except DraftwoodError as error:  # left alone, Dynamo would call it the client's fault: it is a ValueError
            raise Unknown(str(error)) from error

    async def abort(self, context: Any) -> None:
        if self._engine is not None:
            self._engine.abort(context.id())

    async def health_check_payload(self) -> dict[str, Any]:
        """One token: only an engine whose thread runs can answer it. Sent when DYN_HEALTH_CHECK_ENABLED is set."""
        assert self._engine is not None, "health_check_payload() before start()"
        encode = self._engine.llm.tokenizer.encode
        (token, *_) = encode("") or encode("a")  # not every tokenizer adds a begin-of-text token
        payload: dict[str, Any] = build_health_check_payload(token)
        return payload

    async def register_prometheus(self, metrics: Any) -> None:
        """What `draftwood serve` exports, on the worker's /metrics (DYN_SYSTEM_PORT)."""
        metrics.register_prometheus_expfmt_callback(self._metrics)

    def _metrics(self) -> str:
        return "" if self._engine is None else self._engine.to_prometheus()

    async def cleanup(self) -> None:
        """Called some seconds after the worker left discovery, whatever is still in flight: that is finished first."""
        if self._engine is not None:
            await self._engine.drain(self._args.drain_timeout)
            self._engine.close()
            self._engine = None


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--model", required=True, help="folder with config.json and the tokenizer's files")
    parser.add_argument("--served-model-name", default="draftwood")
    parser.add_argument("--endpoint-types", default="completions", help="chat,completions for a model with a template")
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--discovery-backend", default="etcd")
    parser.add_argument("--request-plane", default="tcp")
    parser.add_argument("--threads", type=int, default=0, help="of the target's engine; the cores divided by workers")
    parser.add_argument("--max-running", type=int, default=MAX_RUNNING)
    parser.add_argument("--max-waiting", type=int, default=MAX_WAITING)
    parser.add_argument("--drain-timeout", type=float, default=60, help="seconds for requests in flight on SIGTERM")
    return parser


def sampling_params(request: GenerateRequest) -> SamplingParams:
    """The request's settings. Raises RequestError for one that is not served."""
    sent = {**request.get("sampling_options", {}), **request.get("stop_conditions", {})}
    settings = {name: value for name, value in sent.items() if value is not None}
    ends = (*settings.pop("stop_token_ids", ()), *settings.pop(HIDDEN, ()))
    number = settings.pop("n", 1)
    others = [name for name in settings.keys() - SERVED if settings.pop(name)]  # empty ones ask for nothing
    if others or number != 1:
        raise RequestError(f"not served: {', '.join(sorted(others)) or 'n'}; leave it out")
    return SamplingParams(**settings, stop_token_ids=ends)


if __name__ == "__main__":
    run(DraftwoodEngine)
