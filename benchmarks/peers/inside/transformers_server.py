"""transformers on the CPU, eager: plain, assisted by the draft, or with prompt lookup, as the request says. One text at
a time. The number of draft tokens is constant; the default rule that stops a draft below a confidence of 0.4 stays."""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.inside.served import Written, make_parser, serve


class Transformers:
    def __init__(self, model: str, draft: str | None, threads: int) -> None:
        torch.set_num_threads(threads)
        # Any: the stubs do not fit the classes they describe.
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._target: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        self._draft: Any = draft and AutoModelForCausalLM.from_pretrained(draft, dtype="auto")
        self._lock = Lock()

    def render(self, messages: list[dict[str, str]]) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def write(self, prompt: str, body: dict[str, Any]) -> Written:
        inputs = self._tokenizer(prompt, return_tensors="pt", add_special_tokens="messages" not in body)
        settings: dict[str, Any] = {"do_sample": bool(body["temperature"]), "max_new_tokens": body["max_tokens"]}
        if settings["do_sample"]:
            settings |= {"temperature": body["temperature"], "top_p": 1.0, "top_k": 0}
        if length := body.get("draft"):
            config = self._draft.generation_config
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = length, "constant"
            settings["assistant_model"] = self._draft
        if length := body.get("lookup"):
            settings["prompt_lookup_num_tokens"] = length
        passes: list[None] = []
        with self._lock:
            handle = self._target.register_forward_pre_hook(lambda *ignored: passes.append(None))
            output = self._target.generate(**inputs, **settings)
            handle.remove()
        tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        accepted = len(tokens) - len(passes)  # every pass yields one token of the target's own
        return Written(text, len(tokens), *((accepted, accepted) if len(settings) > 2 else ()))


if __name__ == "__main__":
    args = make_parser().parse_args()
    serve(Transformers(args.model, args.draft, args.threads), args.host, args.port)
