"""How far the distributions of programs are from those of the file's weights in fp32, which transformers computes: the
mean KL(fp32 || program) in nats per token, over HTTP.

The twenty most probable tokens count one by one, all others together, so it is a little less than the whole divergence.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from typing import Any

from benchmarks.peers.client import post
from benchmarks.peers.comparison import Comparison
from benchmarks.peers.program import Conditions, Program, SetupError
from benchmarks.peers.programs.folder import INSIDE, interpreter
from benchmarks.peers.server import Server, ServerError
from benchmarks.peers.texts import OWN, read_prompts

Distribution = Mapping[str, float]  # probability by text of the token
MOST, LEAST = 20, 1e-9  # tokens that servers are asked for; probability of all others
FIRST_WORD, STEP = 8, 6  # a context ends after this word, and after every further so many


def measure_divergences(
    programs: Sequence[Program], conditions: Conditions, comparison: Comparison
) -> dict[str, float | None]:
    """By program/precision; None where a program does not tell log-probabilities."""
    contexts = make_contexts()
    try:
        expected = read_reference(contexts, conditions)
    except SetupError as error:
        comparison.leave_out("divergence", error)
        return {}
    found: dict[str, float | None] = {}
    for program in programs:
        comparison.note(f"divergence: {program.key}")
        try:
            found[program.key] = diverge(program, contexts, expected, comparison)
        except ServerError as error:
            comparison.leave_out(f"divergence {program.key}", error)
            found[program.key] = None
    return found


def diverge(
    program: Program, contexts: Sequence[str], expected: Sequence[Distribution], comparison: Comparison
) -> float:
    with Server((*program.command, *program.plain.start), comparison.log_of(program), program.environment) as server:
        ask = {"model": program.model, "max_tokens": 1, "temperature": 0, "logprobs": MOST, **dict(program.plain.body)}
        answers = [post(f"{server.url}/v1/completions", ask | {"prompt": context}) for context in contexts]
    own = [read_distribution(answer) for answer in answers]
    return sum(map(kl, expected, own)) / len(expected)


def make_contexts() -> list[str]:
    """Beginnings of our own texts to continue."""
    texts = [prompt.turns[0] for prompt in read_prompts(OWN, 4) if prompt.raw]
    ends = [(text, [word.end() for word in re.finditer(r"\S+", text)]) for text in texts]
    return [text[:end] for text, words in ends for end in words[FIRST_WORD::STEP]]


def read_reference(contexts: Sequence[str], conditions: Conditions) -> list[Distribution]:
    """Computed once. Raises SetupError when transformers cannot."""
    made = conditions.work / "models" / f"{conditions.target.stem}-reference.json"
    if not made.is_file():
        python = interpreter("transformers", conditions)
        made.parent.mkdir(parents=True, exist_ok=True)
        texts, unfinished = made.with_suffix(".texts"), made.with_suffix(".unfinished")
        texts.write_text(json.dumps(contexts), encoding="utf-8")
        command = [python, INSIDE / "reference.py", conditions.target, texts, unfinished]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SetupError(f"no reference of {conditions.target.name}: {done.stderr.strip()[-300:]}")
        unfinished.rename(made)
    rows: list[list[tuple[str, float]]] = json.loads(made.read_text(encoding="utf-8"))
    if len(rows) != len(contexts):
        raise SetupError(f"{made} is of other texts: remove it")
    return [gather(row) for row in rows]


def read_distribution(answer: dict[str, Any]) -> Distribution:
    """In OpenAI's form of completions, or in that of conversations, which llama.cpp answers. Raises ServerError."""
    given = answer["choices"][0].get("logprobs") or {}
    if top := given.get("top_logprobs"):
        return gather((token, exp(logprob)) for token, logprob in top[0].items())
    if content := given.get("content"):
        return gather((each["token"], exp(each["logprob"])) for each in content[0]["top_logprobs"])
    raise ServerError("it tells no log-probabilities")


def gather(pairs: Iterable[tuple[str, float]]) -> Distribution:
    """Tokens that are parts of a character have equal texts."""
    found = defaultdict[str, float](float)
    for token, probability in pairs:
        found[token] += probability
    return found


def kl(expected: Distribution, own: Distribution) -> float:
    """Over the tokens that both have, and all others together."""
    both = expected.keys() & own.keys()
    pairs = [(expected[token], own[token]) for token in both]
    pairs.append((1 - sum(p for p, _ in pairs), 1 - sum(q for _, q in pairs)))
    return sum(p * log(p / max(q, LEAST)) for p, q in pairs if p > LEAST)
