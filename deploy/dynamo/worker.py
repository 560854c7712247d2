"""A draftwood worker for NVIDIA Dynamo: token ids in, the tokens of one round per chunk out.

    python worker.py BUNDLE --model CHECKPOINT_FOLDER [--served-model-name NAME] [--discovery-backend file]

Dynamo's front end tokenizes, applies the chat template of CHECKPOINT_FOLDER, and turns tokens into text.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any

from dynamo.common.backend import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.run import run

from draftwood.runtime import RequestError, SamplingParams
from draftwood.runtime.async_llm import AsyncLLM

SERVED = {field.name for field in fields(SamplingParams)}
HIDDEN = "stop_token_ids_hidden"  # the front end's name for the tokens that end a text by themselves


class DraftwoodEngine(LLMEngine):
    """AsyncLLM behind Dynamo's engine interface."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._engine: AsyncLLM | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DraftwoodEngine, WorkerConfig]:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("bundle")
        parser.add_argument("--model", required=True, help="folder with config.json and the tokenizer's files")
        parser.add_argument("--served-model-name", default="draftwood")
        parser.add_argument(
            "--endpoint-types", default="completions", help="chat,completions for a model with a template"
        )
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--discovery-backend", default="etcd")
        parser.add_argument("--request-plane", default="tcp")
        parser.add_argument("--max-running", type=int, default=8)
        args = parser.parse_args(argv)
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
        self._engine = AsyncLLM.open(self._args.bundle, max_running=self._args.max_running)
        limits = LlmRegistration(
            context_length=self._engine.llm.bundle.manifest.max_length, max_num_seqs=self._args.max_running
        )
        return EngineConfig(self._args.model, self._args.served_model_name, llm=limits)

    async def generate(self, request: GenerateRequest, context: Any) -> AsyncGenerator[GenerateChunk, None]:
        assert self._engine is not None, "generate() before start()"
        prompt = request["token_ids"]
        begin = self._engine.llm.tokenizer.encode("")  # the front end leaves it out of plain completions
        if prompt[: len(begin)] != begin:
            prompt = [*begin, *prompt]
        stream = self._engine.generate(prompt, sampling_params(request), request_id=context.id())
        generated = 0
        async for chunk in stream:
            generated += len(chunk.token_ids)
            answer = GenerateChunk(token_ids=chunk.token_ids, index=0)
            if chunk.finish_reason is not None:
                answer["finish_reason"] = "cancelled" if chunk.finish_reason == "abort" else chunk.finish_reason
                answer["completion_usage"] = {
                    "prompt_tokens": stream.num_prompt_tokens,
                    "completion_tokens": generated,
                    "total_tokens": stream.num_prompt_tokens + generated,
                }
            yield answer

    async def abort(self, context: Any) -> None:
        if self._engine is not None:
            self._engine.abort(context.id())

    async def cleanup(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


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
