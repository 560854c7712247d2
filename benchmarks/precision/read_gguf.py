"""Is a GGUF file read as transformers and llama.cpp read it? Logits, texts and tokens; time and memory of a build.

    python -m benchmarks.precision.read_gguf --output benchmarks/results --model SmolLM2-135M-Instruct.Q4_1.gguf \
        --llama-cpp DIR --prompts gsm8k_test.jsonl

--llama-cpp: a folder with llama.cpp's `source` and its programs in `build/bin`. The model is requantised to each of
TYPES by llama-quantize. Of every file: the largest difference of two logits between the torch reference and
transformers, both on that file; greedy texts of a native fp32 bundle built from that file and of llama.cpp on its
numbers as F32, with an fp32 cache; and what the build took. Where two texts part, the reference's logits of both
tokens say how near a tie was. Then llama.cpp's own vocabulary files, with the ids that it expects of them, which are
those of the models' own tokenizers.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from numpy.typing import NDArray

from benchmarks.peers.programs.llama_cpp import start_server
from benchmarks.tools.record import add_output, write_results
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.gguf.header import Metadata, read_header
from draftwood.builder.checkpoints.gguf.tokenizer import tokenizer_in
from draftwood.models.errors import CheckpointError
from draftwood.models.layers import network_of
from draftwood.models.llama import Llama
from draftwood.runtime.llm import LLM
from draftwood.runtime.sampling.params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
TYPES = ("Q8_0", "Q4_0", "Q4_K_M", "Q6_K")
POSITIONS = 1024
LOGIT_TOKENS = 256
BETWEEN = "\n__ggml_vocab_test__\n"  # texts of a vocabulary's .inp file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser, "precision_read_gguf")
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file")
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prompts", type=Path, required=True, help='one {"prompt": ...} per line')
    parser.add_argument("--limit", type=int, default=12, help="prompts to complete")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    quantize = args.llama_cpp / "build" / "bin" / "llama-quantize"
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        whole = converted(quantize, args.model, Path(work) / "F32.gguf", "F32")
        for kind in ("as given", *TYPES):
            given = kind == "as given"
            file = args.model if given else converted(quantize, whole, Path(work) / f"{kind}.gguf", kind)
            rows[kind] = {"bytes": file.stat().st_size, "types": types_in(file)}
            model = reference(file)
            rows[kind]["largest difference from transformers' logits"] = logits_apart(model, file, prompts)
            bundle = Path(work) / "bundle"
            rows[kind]["build"] = measured_build(file, bundle)
            numbers = whole if given else converted(quantize, file, Path(work) / "numbers.gguf", "F32")
            rows[kind]["texts"] = compare_texts(model, bundle, numbers, args, prompts[: args.limit])
            print("\n" + kind, json.dumps(rows[kind]), flush=True)
            subprocess.run(["rm", "-r", str(bundle)], check=True)
    vocabularies = dict(compare_vocabularies(args.llama_cpp / "source" / "models"))
    write_results(args.output, args.name, {"model": args.model.name, "files": rows, "vocabularies": vocabularies})


def converted(program: Path, source: Path, file: Path, kind: str) -> Path:
    """Requantise a file."""
    command = [program, "--allow-requantize", source, file, kind]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return file


def types_in(file: Path) -> dict[str, int]:
    """How many tensors each type has."""
    kinds = [tensor.dtype for tensor in read_header(file).tensors.values()]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def reference(file: Path) -> Llama:
    """The torch reference on a file's numbers."""
    checkpoint = Checkpoint(file)
    model = Llama(checkpoint.config, POSITIONS)
    names = network_of(checkpoint.config).tensors()
    model.load_state_dict({name: torch.from_numpy(checkpoint.tensor(name).copy()) for name in names})
    return model


@torch.no_grad()
def logits_apart(model: Llama, file: Path, prompts: Sequence[str]) -> float:
    """The largest difference of two logits over the first tokens of the prompts."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder, Checkpoint(file).write_tokenizer(Path(folder)) as tokenizer:
        tokens = torch.tensor([tokenizer.encode("\n\n".join(prompts[:20]))[:LOGIT_TOKENS]])
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return float((model.full(tokens).logits - theirs(tokens).logits).abs().max())


def measured_build(file: Path, bundle: Path) -> dict[str, float]:
    """Build a native fp32 bundle, the file as target and as draft. Seconds, and the most memory in MB."""
    program = [sys.executable, str(ROOT / "build_engines.py"), "--backend", "native", "--precision", "fp32"]
    paths = ["--target", str(file), "--draft", str(file), "--draft-precision", "fp32", "--output", str(bundle)]
    begin = perf_counter()
    process = subprocess.Popen(
        [*program, *paths, "--max-length", str(POSITIONS), "--no-profile"], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{file} cannot be built")
    processor = usage.ru_utime + usage.ru_stime
    seconds = perf_counter() - begin
    return {"seconds": seconds, "processor_seconds": processor, "most_megabytes": usage.ru_maxrss * 1024 / 1e6}


def compare_texts(
    model: Llama, bundle: Path, numbers: Path, args: argparse.Namespace, prompts: Sequence[str]
) -> dict[str, Any]:
    """Greedy texts of conversations: how many are equal, and where the others part."""
    params, equal, parted = SamplingParams(temperature=0.0, max_tokens=args.max_tokens), 0, list[dict[str, Any]]()
    with LLM(bundle, None) as llm, llama_server(args.llama_cpp, numbers) as connection:
        for prompt in prompts:
            text = llm.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
            tokens = llm.tokenizer.encode(text, add_special_tokens=False)
            ours = llm.generate(tokens, params)[0].token_ids
            theirs = complete(connection, tokens, args.max_tokens)
            place = next(
                (index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None
            )
            if place is None:
                equal += 1
                continue
            logits = last_logits(model, [*tokens, *ours[:place]])
            gap = float(logits[ours[place]] - logits[theirs[place]])
            parted.append({"prompt": prompt[:40], "token": place, "logits_apart": gap})
    return {"prompts": len(prompts), "equal": equal, "parted": parted}


@torch.no_grad()
def last_logits(model: Llama, tokens: list[int]) -> NDArray[Any]:
    logits: NDArray[Any] = model.full(torch.tensor([tokens])).logits[0, -1].numpy()
    return logits


@contextmanager
def llama_server(folder: Path, model: Path) -> Iterator[http.client.HTTPConnection]:
    """llama-server on one model, with keys and values in fp32."""
    arguments = ["-m", model, "-c", POSITIONS, "-np", 1, "-t", 1, "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    program = folder / "build" / "bin" / "llama-server"
    connection, process = start_server([program, *arguments, "--no-warmup", "--log-disable"])
    try:
        yield connection
    finally:
        process.terminate()
        process.wait()


def complete(connection: http.client.HTTPConnection, prompt: list[int], max_tokens: int) -> list[int]:
    """llama.cpp's greedy tokens behind a prompt."""
    body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0.0, "samplers": ["temperature"]}
    body |= {"cache_prompt": False, "return_tokens": True}
    connection.close()
    connection.connect()
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    tokens: list[int] = json.loads(connection.getresponse().read())["tokens"]
    return tokens


def compare_vocabularies(folder: Path) -> Iterator[tuple[str, Any]]:
    """Of each vocabulary file of llama.cpp: how many of its texts have the ids it expects, or why it is refused."""
    for file in sorted(folder.glob("ggml-vocab-*.gguf")):
        texts, ids = (file.with_name(file.name + end) for end in (".inp", ".out"))
        if not texts.is_file():
            continue
        metadata = Metadata(file, read_header(file).metadata)
        try:
            tokenizer = tokenizer_in(metadata)
        except CheckpointError as error:
            yield file.stem, {"refused": str(error).partition(": ")[2]}
            continue
        expected = [list(map(int, line.split())) for line in ids.read_text().splitlines()]
        found = texts.read_bytes().decode().split(BETWEEN)[: len(expected)]
        same = [
            tokenizer.encode(text, add_special_tokens=False).ids == each
            for text, each in zip(found, expected, strict=True)
        ]
        yield file.stem, {"texts": len(same), "equal": sum(same)}


if __name__ == "__main__":
    main()
