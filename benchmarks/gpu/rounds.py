"""What a round at temperature 0 asks of a device: waits, copies, bytes and launches, by the host and on the device.

    PYTHONPATH=tests/support python -m benchmarks.gpu.rounds --output benchmarks/results

The engines are those of TensorRT plans over a device that the host stands in for (`tests/support/host_device.py`), with
the demo pair's exported graphs. The kernels of rounds run from their PTX. Counts depend on no machine, and nothing is
timed. Both ways must write the same text, otherwise the script fails.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from benchmarks.tools.record import add_output, write_results
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.models import bindings
from draftwood.runtime import SamplingParams, SpecDecodeStats, SpeculativeConfig
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.engines.base import EngineSpec
from draftwood.runtime.engines.static.engine import StaticEngine
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
WIDTHS, CAPACITY, MAX_LENGTH = (1, 2, 4, 8, 16, 32), 512, 384
PROMPTS = ("def fibonacci(n):\n", "import os\n", "class Queue:\n    def __init__(self):\n")
PARAMS = SamplingParams(max_tokens=96, temperature=0, ignore_eos=True)
CONFIGS = {
    "chain of 4": SpeculativeConfig("chain", budget="fixed", max_draft_len=4),
    "top-k tree of 15, depth 5": SpeculativeConfig("topk", budget="fixed", max_draft_len=5),
}
COPIES = ("upload", "download")


class Measured(NamedTuple):
    """tokens: of all texts. rounds: those that were counted, without the first one of each text, which begins with the
    prompt. counts: sums over these rounds."""

    tokens: list[int]
    rounds: int
    counts: Counter[str]


def engines(folder: Path, device: Any) -> list[StaticEngine]:
    """The target and the draft of the demo pair on one device."""
    from host_device import OnnxProgram

    opened = []
    for role in bindings.ROLES:
        checkpoint, graph = Checkpoint(DEMO / role), folder / f"{role}.onnx"
        export(checkpoint, role, CAPACITY, graph, lambda name: None, form=bindings.COMPACT)
        outputs = bindings.output_names(role, form=bindings.COMPACT)
        spec = EngineSpec(role, "tensorrt-rtx", "", checkpoint.config, WIDTHS, CAPACITY, "fp32", outputs)
        opened.append(StaticEngine(spec, OnnxProgram(graph, device, 128), device))
    return opened


def asked(device: Any) -> Counter[str]:
    """Everything so far: what ran, inside graphs too, bytes of copies, waits and graph launches of the host."""
    copies = Counter({f"{kind} bytes": device.copied[kind] for kind in COPIES})
    kernels = sum(count for kind, count in device.done.items() if kind not in (*COPIES, "enqueue", "replay"))
    ran = Counter({kind: device.done[kind] for kind in (*COPIES, "enqueue")}) + Counter(kernels=kernels)
    host = Counter({kind: device.launches.get(kind, 0) for kind in ("synchronize", "replay")})
    return ran + copies + host


def measure(pair: list[StaticEngine], config: SpeculativeConfig) -> Measured:
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    target, draft = pair
    decoder = SpeculativeDecoder(target, draft, config, MAX_LENGTH, ())
    tokens, rounds, counts = list[int](), 0, Counter[str]()
    for text in PROMPTS:
        prompt = tokenizer.encode(text).ids
        sampler = Sampler(PARAMS, prompt, (), target.spec.model.vocab_size)
        before = Counter[str]()
        for index, chunk in enumerate(decoder.generate(prompt, sampler, seeded_streams(0), SpecDecodeStats())):
            tokens += chunk.token_ids
            now = asked(target.device)
            if index:
                rounds, counts = rounds + 1, counts + (now - before)
            before = now
    decoder.close()
    return Measured(tokens, rounds, counts)


def compare(pair: list[StaticEngine], config: SpeculativeConfig) -> dict[str, dict[str, float]]:
    """Counts per round by the host and on the device. Raises SystemExit if the texts differ."""
    device: Any = pair[0].device
    results: dict[str, Measured] = {}
    for name in ("host", "device"):
        device.runs_rounds = name == "device"
        results[name] = measure(pair, config)
    if results["host"].tokens != results["device"].tokens:
        raise SystemExit("the texts of rounds on the device differ from those by the host")
    return {
        name: {"rounds": each.rounds} | {kind: round(count / each.rounds, 2) for kind, count in each.counts.items()}
        for name, each in results.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser, "gpu_rounds")
    arguments = parser.parse_args()
    from host_device import HostDevice

    with tempfile.TemporaryDirectory() as folder:
        pair = engines(Path(folder), HostDevice())
        found = {name: compare(pair, config) for name, config in CONFIGS.items()}
    print(json.dumps(found, indent=2))
    figures = {"prompts": PROMPTS, "max_tokens": PARAMS.max_tokens, "per_round": found}
    write_results(arguments.output, arguments.name, figures)


if __name__ == "__main__":
    main()
