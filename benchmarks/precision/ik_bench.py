"""The speed of ik_llama.cpp's package for Python (`pip install ik-llama-cpp-python==0.1.5`, compiled for AVX2), with
the options and the output of a llama-bench that `files.py` uses. It runs in an environment of its own. Like llama-bench
it only computes passes: the package chooses tokens in Python, which would take half of the time."""

from __future__ import annotations

import argparse
import json
from time import perf_counter
from typing import Any


def main() -> None:
    from ik_llama_cpp import IkLlama
    from ik_llama_cpp.llama import C, make_batch_single

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", dest="model", required=True)
    for name in ("-p", "-n", "-t"):
        parser.add_argument(name, type=int, required=True)
    args, _ = parser.parse_known_args()
    llm: Any = IkLlama(args.model, n_ctx=1024, n_threads=args.t, verbose=False)
    tokens = [1 + index % 1000 for index in range(args.p)]
    llm.generate(tokens[:64], max_tokens=1)
    start = perf_counter()
    llm.generate(tokens, max_tokens=0)
    read = perf_counter() - start
    llm.generate(tokens[:64], max_tokens=0)
    start = perf_counter()
    for index in range(args.n):
        batch = make_batch_single(tokens[index % len(tokens)], 64 + index)
        if llm._context.decode(batch):
            raise SystemExit("a pass failed")
        C.llama_batch_free(batch)
    plain = args.n / (perf_counter() - start)
    print(json.dumps([{"n_prompt": args.p, "avg_ts": args.p / read}, {"n_prompt": 0, "avg_ts": plain}]))


if __name__ == "__main__":
    main()
