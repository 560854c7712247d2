"""What a real draft would have proposed, and what the target would have accepted, before every token of real texts.

    python -m benchmarks.planning.traces bundles/smollm2 --prompts PROMPTS.jsonl --trace build/smollm2.trace.json

At temperature 0 the text does not depend on the proposals. So the draft's greatest tree before each token, and the
tokens that followed, say how many tokens of any smaller proposal would have been accepted: `replay.py` needs no engine.

Above temperature 0 (--temperature) the text is one that the target has drawn. Before each of its tokens a chain and a
tree of each of `DEPTHS` are drawn and verified, the trees by recursive rejection: it tests the children of a node in
their order, so a tree that lacks the last ones would have accepted the same path as far as it goes.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

from draftwood.cli.bench import read_prompts
from draftwood.models.bindings import TARGET
from draftwood.runtime import LLM, SamplingParams
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.base import Engine
from draftwood.runtime.engines.passes import prefill, run
from draftwood.runtime.sampling.random import RandomStreams, seeded_streams
from draftwood.runtime.sampling.sampler import Sampler, ScoredRows
from draftwood.runtime.sampling.softmax import softmax_of
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.graph.token_graph import TokenGraph
from draftwood.runtime.speculation.graph.token_tree import TokenTree, root_alone, unroll
from draftwood.runtime.speculation.growers.baseline import BestFirst
from draftwood.runtime.speculation.growers.gsd import NO_MERGER
from draftwood.runtime.speculation.planning.calibration import uncorrected
from draftwood.runtime.speculation.planning.estimate import VerifierChoice
from draftwood.runtime.speculation.proposer import DraftProposer

LIMITS = SpeculativeConfig()  # of depth, size and width
GROWN = 400  # nodes of a tree that contains the best ones of every depth
FIRST = ord("0")  # the character of row 0
TREE = SpeculativeConfig("dyspec", verify="rejection")
BETWEEN = "|"  # trees of a place
DEPTHS = (1, 2, 3, 4, LIMITS.max_draft_len)  # of trees that are drawn: each draws other tokens


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


class DrawnPlace(NamedTuple):
    """Before one token of a drawn text: the tree of each of DEPTHS."""

    trees: tuple[Place, ...]

    def verify(self, depth: int, size: int, chain: bool) -> Verified:
        """A proposal of these limits."""
        return self.trees[bisect_left(DEPTHS, depth)].verify(depth, size, chain)

    def encode(self) -> str:
        return BETWEEN.join(tree.encode() for tree in self.trees)


class Trace(NamedTuple):
    """One text behind a prompt of so many tokens. places: before each of its tokens."""

    prompt: int
    places: Sequence[Place | DrawnPlace]


def read_traces(file: Path) -> list[Trace]:
    texts = json.loads(file.read_text(encoding="utf-8"))["texts"]
    return [Trace(text["prompt"], list(map(decode_place, text["places"]))) for text in texts]


def decode_place(text: str) -> Place | DrawnPlace:
    """A place of either kind."""
    trees = tuple(map(Place.decode, text.split(BETWEEN)))
    return trees[0] if len(trees) == 1 else DrawnPlace(trees)


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
    written, depth = list(prompt), LIMITS.max_draft_len
    proposer = DraftProposer(draft, written)
    sampler = Sampler(SamplingParams(temperature=0), prompt, (), draft.spec.model.vocab_size)
    places = []
    try:
        run(proposer.read())
        for position in range(len(text) - depth):
            root = text[position - 1] if position else prompt[-1]
            tree = propose(proposer, root, sampler, (GROWN, depth, LIMITS.frontier_width))
            places.append(make_place(tree, text[position : position + depth]))
            proposer.commit(root_alone(root), [])
            written.append(text[position])
    finally:
        proposer.close()
    return Trace(len(prompt), places)


class Pair(NamedTuple):
    """Both engines."""

    target: Engine
    draft: Engine


def record_drawn(pair: Pair, prompt: Sequence[int], text: Sequence[int], params: SamplingParams, seed: int) -> Trace:
    """The same of a text that was drawn with `params`."""
    chains = draw_proposals(pair, prompt, text, params, seeded_streams(seed), SpeculativeConfig("chain"))
    trees = [
        draw_proposals(pair, prompt, text, params, seeded_streams(seed), replace(TREE, max_draft_len=depth))
        for depth in DEPTHS
    ]
    places = []
    for (_, chain), *drawn in zip(chains, *trees, strict=True):
        found = (Place(tuple(tree.parents[1:]), tuple(rows), len(chain)) for tree, rows in drawn)
        places.append(DrawnPlace(tuple(found)))
    return Trace(len(prompt), places)


def draw_proposals(
    pair: Pair,
    prompt: Sequence[int],
    text: Sequence[int],
    params: SamplingParams,
    streams: RandomStreams,
    config: SpeculativeConfig,
) -> list[tuple[TokenTree, list[int]]]:
    """A proposal before every token of a text but the last ones, and its accepted rows. The text goes on as it is."""
    written, cache = list(prompt), pair.target.new_cache()
    proposer = DraftProposer(pair.draft, written)
    sampler = Sampler(params, prompt, (), pair.target.spec.model.vocab_size)
    sampler.use(softmax_of(pair.target))
    calibration, rules = config.calibration(False), config.rules(False)
    estimate = calibration or uncorrected
    found: list[tuple[TokenTree, list[int]]] = []
    with closing(proposer), closing(cache):
        run(proposer.read())
        prefill(pair.target, cache, prompt[:-1])
        for position in range(len(text) - LIMITS.max_draft_len):
            root = text[position - 1] if position else prompt[-1]
            graph, grower = TokenGraph(root), rules.grower(config.max_draft_len, estimate)
            run(proposer.propose(graph, grower, rules.stopper(estimate), sampler, streams.draft))
            tree = unroll(graph, config.max_tokens, config.max_draft_len)
            output = pair.target.score(tree.to_batch(pair.target.spec, cache.length, False, sampler.wanted), cache)
            rows = config.verifier(False)(tree, ScoredRows(sampler, output.logits, output.softmaxes), streams).rows
            if calibration is not None:
                calibration.update(tree, rows)
            found.append((tree, rows))
            cache.commit([0])
            proposer.commit(root_alone(root), [])
            written.append(text[position])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="take each so-manieth prompt")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--max-prompt", type=int, default=128, help="tokens; leave longer prompts out")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--trace", type=Path, required=True, help="the file to write")
    args = parser.parse_args()
    length = args.tokens + LIMITS.max_draft_len
    params = SamplingParams(temperature=args.temperature, max_tokens=length, ignore_eos=True, seed=0)
    with LLM(args.bundle, speculative=None) as llm:
        asked = read_prompts(args.prompts)[:: args.every]
        chats = (llm.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in asked)
        prompts = [llm.tokenizer.encode(text, add_special_tokens=False) for text in chats]
        prompts = [prompt for prompt in prompts if len(prompt) <= args.max_prompt][: args.texts]
        texts = [list(result.token_ids) for result in llm.generate(prompts, params)]
    bundle = EngineBundle.open(args.bundle)
    with closing(bundle.open_draft()) as draft, closing(bundle.open_engine(TARGET)) as target:
        traces = []
        for number, (prompt, text) in enumerate(track(list(zip(prompts, texts, strict=True)), "Recording")):
            drawn = args.temperature > 0
            made = (
                record_drawn(Pair(target, draft), prompt, text, params, number)
                if drawn
                else record(draft, prompt, text)
            )
            traces.append(made)
    kind = {"bundle": args.bundle.name, "temperature": args.temperature}
    encoded = [{"prompt": trace.prompt, "places": [place.encode() for place in trace.places]} for trace in traces]
    args.trace.write_text(json.dumps(kind | {"texts": encoded}, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
