"""OpenVINO GenAI on the CPU, on its continuous-batching backend: plain, with a draft or with prompt lookup, which is
chosen when it starts."""

from __future__ import annotations

from itertools import count
from threading import Condition, Thread
from typing import Any

import openvino_genai as genai

from benchmarks.peers.inside.served import Written, make_parser, serve

CACHE_GB = 1


class OpenVino:
    def __init__(self, model: str, draft: str | None, kind: str, threads: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GB, False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        more: dict[str, Any] = {}
        if kind == "draft":
            more["draft_model"] = genai.draft_model(draft, "CPU", **properties)
        if kind == "lookup":
            more["prompt_lookup"] = True
        self._kind = kind
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties | more)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._numbers, self._changed, self._handles = count(), Condition(), dict[int, Any]()
        self._tokens: dict[int, list[int]] = {}
        Thread(target=self._run, daemon=True).start()

    def render(self, messages: list[dict[str, str]]) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return text

    def write(self, prompt: str, body: dict[str, Any]) -> Written:
        config = self._pipeline.get_config()
        config.max_new_tokens, config.do_sample = body["max_tokens"], bool(body["temperature"])
        if config.do_sample:
            config.temperature, config.top_p, config.top_k = body["temperature"], 1.0, 1 << 30
            config.rng_seed = next(self._numbers)
        if self._kind != "plain":
            config.num_assistant_tokens = body["tokens"]
        if self._kind == "lookup":
            config.max_ngram_size = 3
        with self._changed:
            number = next(self._numbers)
            self._tokens[number] = []
            self._handles[number] = self._pipeline.add_request(number, prompt, config)
            self._changed.notify_all()
            self._changed.wait_for(lambda: number not in self._handles)
            tokens = self._tokens.pop(number)
        return Written(self._tokenizer.decode(tokens), len(tokens))

    def _run(self) -> None:
        """The steps of the pipeline, which all texts share."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._handles)
                self._pipeline.step()
                for number, handle in list(self._handles.items()):
                    while handle.can_read():
                        for output in handle.read().values():
                            self._tokens[number] += output.generated_ids
                    if handle.get_status() != genai.py_openvino_genai.GenerationStatus.RUNNING:
                        del self._handles[number]
                self._changed.notify_all()


if __name__ == "__main__":
    args = make_parser().parse_args()
    serve(OpenVino(args.model, args.draft, args.kind, args.threads), args.host, args.port)
