"""Whether two checkouts of this project write the same texts: every backend, configuration and shape, token for token.

    PYTHONPATH=tests/support python -m benchmarks.tools.same_texts --old OLD/.venv/bin/python --new .venv/bin/python \
        --data ../shared/data

Each interpreter builds its own bundles from the same checkpoints on this machine, so that kernels of both are compiled
for the same processor, and decodes the same prompts: greedily, and drawn with seeds. The checkpoints are the demo pair,
stories260K where `--data` has it, and random ones of every shape of the tests. A difference is an error, exit code 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ("def fibonacci(n):\n", "Once upon a time")
BUILDS = (("onnxruntime", "fp32"), ("onnxruntime", "int8"), ("native", "fp32"), ("native", "bf16"), ("native", "int8"))
GREEDY: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"max_tokens": 32, "temperature": 0.8, "top_p": 0.95, "seed": 7, "ignore_eos": True}
PENALISED: dict[str, Any] = SAMPLED | {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logprobs": 2}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "auto": {"max_draft_len": 5},
    "planned": {"budget": "cost"},
    "chain": {"grow": "chain", "max_draft_len": 4},
    "lookup": {"grow": "lookup"},
    "chain, rejection": {"grow": "chain", "max_draft_len": 4, "verify": "rejection"},
    "chain, confidence": {"grow": "chain", "max_draft_len": 8, "stop_rule": "confidence"},
    "k-ary": {"grow": "k-ary", "branching": (2, 2, 1), "max_total_draft_tokens": 10},
    "static": {"grow": "static", "topology": (0, 0, 1, 1, 3)},
    "topk": {"grow": "topk", "max_total_draft_tokens": 24, "max_draft_len": 6},
    "topk, gsd": {"grow": "topk", "merge": "gsd", "max_total_draft_tokens": 24, "max_draft_len": 6},
    "dyspec": {"grow": "dyspec", "max_total_draft_tokens": 15, "stop_rule": "entropy"},
    "dyspec-heap": {"grow": "dyspec-heap", "max_total_draft_tokens": 12},
    "dyspec-threshold": {"grow": "dyspec-threshold"},
    "dyspec-threshold, gsd": {"grow": "dyspec-threshold", "merge": "gsd"},
}


def write_texts(pairs: list[list[str]], output: Path) -> None:
    """What this interpreter's Draftwood writes for each pair of checkpoints, as JSON: name -> token ids by prompt."""
    from draftwood.builder.options import BuildOptions
    from draftwood.builder.pipeline import build

    texts: dict[str, list[list[int]]] = {}
    for name, target, draft in pairs:
        for backend, precision in BUILDS:
            with tempfile.TemporaryDirectory() as folder:
                options = BuildOptions(
                    Path(target), Path(draft), Path(folder) / "bundle", backend=backend, precision=precision
                )
                try:
                    build(options, lambda step: lambda: None)
                except ValueError as error:  # sizes that a format cannot block: both must refuse them alike
                    texts[f"{name}, {backend}, {precision}"] = [[*str(error).encode()]]
                    continue
                texts |= {f"{name}, {backend}, {precision}, {key}": ids for key, ids in decoded(options.output)}
    output.write_text(json.dumps(texts), encoding="utf-8")


def decoded(bundle: Path) -> Iterator[tuple[str, list[list[int]]]]:
    """Token ids of every configuration and kind of sampling, one by one and as a list whose requests share passes."""
    from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig

    for name, fields in CONFIGS.items():
        config = None if fields is None else SpeculativeConfig(**{"budget": "fixed", **fields})
        with LLM(bundle, config) as llm:
            for kind, values in (("greedy", GREEDY), ("sampled", SAMPLED), ("penalised", PENALISED)):
                params = SamplingParams(**values)
                yield f"{name}, {kind}", [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS]
                yield f"{name}, {kind}, together", [each.token_ids for each in llm.generate(list(PROMPTS), params)]


def pairs_of_checkpoints(folder: Path, data: Path | None) -> Iterator[list[str]]:
    """Name, target and draft of every pair; random ones are written to `folder`."""
    from checkpoints import SHAPES, write_checkpoint, write_tokenizer

    demo = ROOT / "models" / "demo"
    yield ["demo", str(demo / "target"), str(demo / "draft")]
    if data is not None and (data / "stories260K").is_dir():
        yield ["stories260K", str(data / "stories260K" / "target"), str(data / "stories260K" / "draft")]
    for shape in SHAPES:
        for role, seed in (("target", 0), ("draft", 1)):
            write_checkpoint(folder / shape / role, shape, seed=seed)
            write_tokenizer(folder / shape / role)
        yield [shape, str(folder / shape / "target"), str(folder / shape / "draft")]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Names of texts that are not the same in both, or are in one only."""
    return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, metavar="PYTHON", help="the interpreter of one checkout")
    parser.add_argument("--new", type=Path, metavar="PYTHON", help="the interpreter of the other")
    parser.add_argument("--data", type=Path, help="the folder that holds stories260K")
    parser.add_argument("--pairs", nargs="+", metavar="NAME", help="these pairs only, such as demo, gqa, 'head_dim 6'")
    parser.add_argument("--write", nargs=2, type=Path, metavar=("PAIRS", "TEXTS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_texts(json.loads(args.write[0].read_text()), args.write[1])
        return 0
    if args.old is None or args.new is None:
        parser.error("name both interpreters: --old PYTHON --new PYTHON")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = [pair for pair in pairs_of_checkpoints(folder, args.data) if not args.pairs or pair[0] in args.pairs]
        (folder / "pairs.json").write_text(json.dumps(pairs))
        texts = []
        for side, python in (("old", args.old), ("new", args.new)):
            command = [str(python), __file__, "--write", str(folder / "pairs.json"), str(folder / f"{side}.json")]
            subprocess.run(command, check=True, cwd=folder)
            texts.append(json.loads((folder / f"{side}.json").read_text()))
    found = differences(*texts)
    count = sum(map(len, texts[0].values()))
    print(f"{count} texts of {len(texts[0])} configurations, {len(found)} different", *found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
