"""What a real draft would have proposed, and what the target would have accepted, before every token of real texts.

    python -m benchmarks.planning.traces bundles/smollm2 --prompts PROMPTS.jsonl --trace build/smollm2.trace.json

At temperature 0 the text does not depend on the proposals. So the draft's greatest tree before each token, and the
tokens that followed, say how many tokens of any smaller proposal would have been accepted: `replay.py` needs no engine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

from draftwood.cli.bench import read_prompts
from draftwood.runtime import LLM, SamplingParams
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.base import Engine
from draftwood.runtime.engines.passes import run
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.graph.token_graph import TokenGraph
from draftwood.runtime.speculation.graph.token_tree import TokenTree, root_alone, unroll
from draftwood.runtime.speculation.growers.baseline import BestFirst
from draftwood.runtime.speculation.growers.gsd import NO_MERGER
from draftwood.runtime.speculation.planning.estimate import VerifierChoice
from draftwood.runtime.speculation.proposer import DraftProposer

LIMITS = SpeculativeConfig()  # of depth, size and width
GROWN = 400  # nodes of a tree that contains the best ones of every depth
FIRST = ord("0")  # the character of row 0


class Verified(NamedTuple):
    """What a round would have shown: the accepted rows of a proposal, and the verifier's choices along them."""

    rows: list[int]
    choices: list[VerifierChoice]


class Place(NamedTuple):
    """Before one token of a text. parents: of every node of the draft's greatest tree, in order of value; node i is
    row i + 1, and the root is row 0. path: the rows of the tokens that followed, as far as the tree has them. chained:
    accepted tokens of the longest chain."""

    parents: tuple[int, ...]
    path: tuple[int, ...]
    chained: int

    def verify(self, depth: int, size: int, chain: bool) -> Verified:
        """A proposal of these limits."""
        if chain:
            right = min(self.chained, depth)
            choices = [VerifierChoice(0, 1)] * right + [VerifierChoice(None, 1)] * (right < depth)
            return Verified(list(range(1, right + 1)), choices)
        depths, rows, offered = [0], {0: 0}, {0: 0}  # rows: of this tree, by those of the greatest
        ranks: dict[int, int] = {}
        for node, parent in enumerate(self.parents, start=1):
            depths.append(depths[parent] + 1)
            if depths[node] > depth or len(rows) > size or parent not in rows:
                continue
            rows[node], offered[node] = len(rows), 0
            ranks[node] = offered[parent]
            offered[parent] += 1
        taken = [node for node in self.path if node in rows]
        choices = [VerifierChoice(ranks[node], offered[above]) for above, node in zip((0, *taken), taken, strict=False)]
        last = taken[-1] if taken else 0
        if offered[last]:
            choices.append(VerifierChoice(None, offered[last]))
        return Verified([rows[node] for node in taken], choices)

    def encode(self) -> str:
        return (
            "".join(chr(FIRST + row) for row in self.parents)
            + " "
            + "".join(chr(FIRST + row) for row in (*self.path, self.chained))
        )

    @classmethod
    def decode(cls, text: str) -> Place:
        parents, path = ([ord(each) - FIRST for each in part] for part in text.split(" "))
        return cls(tuple(parents), tuple(path[:-1]), path[-1])


class Trace(NamedTuple):
    """One text behind a prompt of so many tokens. places: before each of its tokens."""

    prompt: int
    places: list[Place]


def read_traces(file: Path) -> list[Trace]:
    texts = json.loads(file.read_text(encoding="utf-8"))["texts"]
    return [Trace(text["prompt"], list(map(Place.decode, text["places"]))) for text in texts]


def propose(proposer: DraftProposer, root: int, sampler: Sampler, limits: tuple[int, int, int]) -> TokenTree:
    """The best-first tree of a size, depth and width, as a round at temperature 0 grows it."""
    size, depth, width = limits
    graph = TokenGraph(root)
    grower, stopper = BestFirst(size, depth, width, NO_MERGER), LIMITS.stopper()
    run(proposer.propose(graph, grower, stopper, sampler, seeded_streams(0).draft, ranking_only=True))
    return unroll(graph, size, depth)


def follow(tree: TokenTree, following: Sequence[int]) -> list[int]:
    """The rows of the tokens that follow, as far as the tree has them."""
    path, row = [], 0
    for token in following:
        found = [child for child in tree.children[row] if tree.token_ids[child] == token]
        if not found:
            break
        row = found[0]
        path.append(row)
    return path


def make_place(tree: TokenTree, following: Sequence[int]) -> Place:
    """Keep those rows that are among the best ones of some depth. The chain is the tree's first branch."""
    kept: set[int] = set()
    for depth in range(1, LIMITS.max_draft_len + 1):
        within = (row for row in range(1, len(tree)) if tree.depths[row] <= depth)
        kept.update(islice(within, LIMITS.max_total_draft_tokens))
    number = {row: index for index, row in enumerate([0, *sorted(kept)])}
    rows = follow(tree, following)
    first = [row == tree.children[above][0] for above, row in zip((0, *rows), rows, strict=False)]
    chained = first.index(False) if False in first else len(first)
    parents = tuple(number[tree.parents[row]] for row in sorted(kept))
    return Place(parents, tuple(number[row] for row in rows if row in number), chained)


def record(draft: Engine, prompt: Sequence[int], text: Sequence[int]) -> Trace:
    """The draft's proposals before every token of a text but the last ones, which are needed to verify."""
    proposer, depth = DraftProposer(draft), LIMITS.max_draft_len
    sampler = Sampler(SamplingParams(temperature=0), prompt, (), draft.spec.model.vocab_size)
    places = []
    try:
        run(proposer.start(prompt))
        for position in range(len(text) - depth):
            root = text[position - 1] if position else prompt[-1]
            tree = propose(proposer, root, sampler, (GROWN, depth, LIMITS.frontier_width))
            places.append(make_place(tree, text[position : position + depth]))
            proposer.commit(root_alone(root), [], text[position])
    finally:
        proposer.close()
    return Trace(len(prompt), places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="take each so-manieth prompt")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--max-prompt", type=int, default=128, help="tokens; leave longer prompts out")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--trace", type=Path, required=True, help="the file to write")
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.tokens + LIMITS.max_draft_len, ignore_eos=True)
    with LLM(args.bundle, speculative=None) as llm:
        asked = read_prompts(args.prompts)[:: args.every]
        chats = (llm.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in asked)
        prompts = [llm.tokenizer.encode(text, add_special_tokens=False) for text in chats]
        prompts = [prompt for prompt in prompts if len(prompt) <= args.max_prompt][: args.texts]
        texts = [list(result.token_ids) for result in llm.generate(prompts, params)]
    bundle = EngineBundle.open(args.bundle)
    with closing(bundle.open_draft()) as draft:
        traces = [
            record(draft, prompt, text)
            for prompt, text in track(list(zip(prompts, texts, strict=True)), "Recording", transient=True)
        ]
    encoded = [{"prompt": trace.prompt, "places": [place.encode() for place in trace.places]} for trace in traces]
    args.trace.write_text(json.dumps({"bundle": args.bundle.name, "texts": encoded}, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
