"""Structured outputs: time per node, and the speed of texts with and without a schema, plain and speculative.

python -m benchmarks.costs.structured bundles/smollm2 --output benchmarks/results
"""

from __future__ import annotations

import argparse
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import median
from time import process_time, thread_time
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.tools.record import add_output, write_results
from draftwood.runtime import LLM, SamplingParams, SpecDecodeStats, SpeculativeConfig, StructuredOutput
from draftwood.runtime.sampling.constraint import PathMasks
from draftwood.runtime.structured.grammars import Grammar, Grammars

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 40},
        "languages": {"type": "array", "items": {"enum": ["English", "French", "German"]}, "maxItems": 3},
        "employed": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "languages", "employed"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": StructuredOutput(json=PERSON),
    "any object": StructuredOutput(json_object=True),
    "regular expression": StructuredOutput(regex="[A-Z][a-z]+( [A-Z][a-z]+){0,2}, [0-9]{1,3} years"),
}
FORMS = {"none": None, "schema": GRAMMARS["schema"]}
PEOPLE = ("a teacher in Paris", "a sailor from Hamburg", "a young doctor", "a retired farmer", "a student of music")
WAYS = {
    "plain": None,
    "chain of 4": SpeculativeConfig("chain", max_draft_len=4, budget="fixed"),
    "tree of 15": SpeculativeConfig("dyspec", max_total_draft_tokens=15, max_draft_len=6, budget="fixed"),
    "the same before merging": SpeculativeConfig(
        "dyspec-threshold", max_draft_len=6, verify="rejection", budget="fixed"
    ),
    "merged tree of 15": SpeculativeConfig("dyspec-threshold", "gsd", max_draft_len=6, budget="fixed"),
}
TEMPERATURES = (0.0, 0.8)
MAX_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=int, default=len(PEOPLE))
    parser.add_argument("--repeats", type=int, default=3)
    add_output(parser, "costs_structured")
    arguments = parser.parse_args()
    with LLM(arguments.bundle, SpeculativeConfig()) as llm:
        grammars = {name: time_grammar(llm, form) for name, form in GRAMMARS.items()}
        prompts = PEOPLE[: arguments.prompts]
        Console().print(grammars)
        speeds: list[dict[str, Any]] = []
        for temperature, form, way in product(TEMPERATURES, FORMS, WAYS):
            runs = [speed(llm, prompts, form, way, temperature) for _ in range(arguments.repeats)]
            middle = sorted(runs, key=itemgetter("tokens_per_second"))[len(runs) // 2]
            speeds.append({"form": form, "way": way, "temperature": temperature, **middle})
            Console().print(speeds[-1])
    write_results(arguments.output, arguments.name, {"grammars": grammars, "speeds": speeds})


def speed(llm: LLM, prompts: tuple[str, ...], form: str, way: str, temperature: float) -> dict[str, float]:
    """Tokens per second of decoding, processor time of all threads per token (prompts included), and acceptance."""
    total = SpecDecodeStats()
    whole, began = 0, process_time()
    for seed, person in enumerate(prompts):
        messages = [
            {"role": "user", "content": f"Describe {person} as a JSON object with name, age, city and languages."}
        ]
        params = SamplingParams(MAX_TOKENS, temperature, seed=seed, structured=FORMS[form])
        chunks = list(llm.stream(llm.encode_chat(messages), params, speculative=WAYS[way]))
        total.add(chunks[-1].stats)
        whole += chunks[-1].finish_reason == "stop"
    return {
        "tokens_per_second": round(total.tokens_per_second, 2),
        "cpu_ms_per_token": round(1e3 * (process_time() - began) / total.num_tokens, 2),
        "acceptance_rate": round(total.acceptance_rate, 4),
        "tokens_per_round": round(total.num_tokens / max(1, total.target_passes), 3),
        "host_ms_per_round": round(1e3 * total.host_seconds / max(1, total.target_passes), 3),
        "finished": whole,
    }


def time_grammar(llm: LLM, form: StructuredOutput) -> dict[str, Any]:
    """Microseconds per node along a greedy text, with a sibling beside each node. The first pass over a new grammar
    computes the library's tables; later ones find them. All times are of the thread, not of the clock."""
    grammar = llm.grammars.compile(form)
    messages = [{"role": "user", "content": "Describe a teacher in Paris as a JSON object."}]
    params = SamplingParams(MAX_TOKENS, 0, structured=form)
    tokens = llm.generate(llm.encode_chat(messages), params)[0].token_ids
    manifest = llm.bundle.manifest
    vocab_size = manifest.engines["target"].model.vocab_size
    others = Grammars(llm.tokenizer, vocab_size, manifest.eos_token_ids)
    others.compile(StructuredOutput(choice=["a"]))  # opens the library's tokenizer
    began = thread_time()
    new = others.compile(form)
    compiled = thread_time() - began
    first = along(new, tokens)
    others.close()
    times = [along(grammar, tokens) for _ in range(5)]
    return {
        "compile_ms": round(1e3 * compiled, 2),
        "nodes": len(first),
        "first_node_us_mean": round(1e6 * sum(first) / len(first), 1),
        "first_node_us_worst": round(1e6 * max(first), 1),
        "node_us_median": round(1e6 * median(median(each) for each in times), 1),
        "node_us_worst": round(1e6 * min(max(each) for each in times), 1),
        "apply_us": round(1e6 * median(apply_times(grammar, vocab_size)), 1),
    }


def along(grammar: Grammar, tokens: list[int]) -> list[float]:
    """Seconds of each mask: of a node, and of its most different sibling, in rounds of four tokens."""
    masks, seconds = PathMasks(grammar.start()), list[float]()
    for first in range(0, len(tokens) - 4, 4):
        path: list[int] = []
        for token in tokens[first : first + 4]:
            began = thread_time()
            mask = masks.after(path)
            seconds.append(thread_time() - began)
            if mask is None:
                return seconds
            sibling = int(np.flatnonzero(mask)[-1])
            began = thread_time()
            masks.after([*path, sibling])
            seconds.append(thread_time() - began)
            path.append(token)
        masks.commit(path)
    return seconds


def apply_times(grammar: Grammar, vocab_size: int) -> list[float]:
    """Seconds to put -inf into a row of logits."""
    mask, logits = PathMasks(grammar.start()).after([]), np.zeros(vocab_size, np.float32)
    assert mask is not None
    seconds = []
    for _ in range(200):
        began = thread_time()
        allowed = np.full_like(logits, -np.inf)
        np.copyto(allowed, logits, where=mask)
        seconds.append(thread_time() - began)
    return seconds


if __name__ == "__main__":
    main()
