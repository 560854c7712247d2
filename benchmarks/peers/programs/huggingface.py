"""Hugging Face transformers: plain, assisted by the draft, and with prompt lookup. Eager torch, default settings.

The number of draft tokens is constant, as with the other peers. The default rule that stops drafting below a confidence
of 0.4 stays on.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from transformers import LlamaForCausalLM, __version__

from benchmarks.peers.protocol import PLAIN, Generation, PeerOptions, serve, split_method

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class HuggingFace:
    def __init__(self, options: PeerOptions) -> None:
        torch.set_num_threads(options.threads)
        dtype = TORCH_DTYPES[options.precision]
        # Any: the stubs do not fit the class they describe.
        self._target: Any
        self._draft: Any
        self._target, self._draft = (
            LlamaForCausalLM.from_pretrained(folder, dtype=dtype) for folder in options.checkpoints.values()
        )
        self._target.generation_config.eos_token_id = None
        self._draft.generation_config.eos_token_id = None
        self.version = f"transformers {__version__}, torch {torch.__version__}"
        self.methods, self.at_a_time = options.methods("draft", "lookup"), 1

    def generate(self, method: str, prompts: list[list[int]], max_tokens: int) -> Generation:
        (prompt,) = prompts
        kind, length = split_method(method)
        settings: dict[str, object] = {}
        if kind == "draft":
            config = self._draft.generation_config
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = length, "constant"
            settings = {"assistant_model": self._draft}
        elif kind == "lookup":
            settings = {"prompt_lookup_num_tokens": length}
        elif kind != PLAIN:
            raise ValueError(f"method {method!r} is not one of {', '.join(self.methods)}")
        passes: list[None] = []
        handle = self._target.register_forward_pre_hook(lambda *ignored: passes.append(None))
        start = perf_counter()
        ids = torch.tensor([prompt])
        output = self._target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, **settings
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        seconds = perf_counter() - start
        handle.remove()
        return Generation([tokens], seconds, {"target_passes": len(passes)})


if __name__ == "__main__":
    serve(HuggingFace)
