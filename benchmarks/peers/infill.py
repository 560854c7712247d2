"""How long an editor waits for a completion in the middle of a file, of Draftwood and of llama.cpp.

    python -m benchmarks.peers.infill --target TARGET.gguf --draft DRAFT.gguf --work FOLDER --output benchmarks/results

Each server completes 32 tokens at several places of a file of about 2,000 tokens, with another file as context, which
repeats. Greedy, caches of prompts on, one request at a time; programs take turns, and the fastest repeat counts.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

from benchmarks.peers.program import Conditions, flags
from benchmarks.peers.programs.llama_cpp import find_server
from benchmarks.peers.server import Server
from benchmarks.tools.record import add_output, make_parser, rows_to_json, write_results

ROOT = Path(__file__).parents[2]
FILE, CONTEXT = ROOT / "runtime" / "llm.py", ROOT / "runtime" / "prompt.py"
CHARACTERS = 8000  # of the file: about 2,000 tokens
TOKENS, PLACES = 32, (0.3, 0.5, 0.7)
BATCH, CONTEXT_SIZE = 8192, 12288  # llama.cpp cuts what follows the place to a quarter of a batch, and drops files


class Figures(NamedTuple):
    """Of one program at one place, in seconds; processor: of all threads, which another program's load changes less.
    read: tokens of the prompt that were not in a cache."""

    program: str
    place: float
    first: float
    whole: float
    processor: float
    prompt: int
    read: int
    text: str


def body(place: float, repeat: int) -> dict[str, Any]:
    """The file is another one each time, so that no cache has it."""
    text = f"# Version {repeat}\n" + FILE.read_text(encoding="utf-8")[:CHARACTERS]
    cut = text.index("\n", int(len(text) * place)) + 9  # in the middle of a line
    extra = [{"filename": CONTEXT.name, "text": CONTEXT.read_text(encoding="utf-8")}]
    texts = {"input_prefix": text[:cut], "input_suffix": text[text.index("\n", cut) :], "input_extra": extra}
    return {**texts, "n_predict": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}


def ask(program: str, server: Server, place: float, repeat: int) -> Figures:
    content = json.dumps(body(place, repeat)).encode()
    request = Request(f"{server.url}/infill", content, {"content-type": "application/json"})
    start, first, text, used = perf_counter(), 0.0, "", server.processor_seconds()
    with urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                last = json.loads(line[6:])
                text += last["content"]
                first = first or (perf_counter() - start if text else 0.0)
    whole, used = perf_counter() - start, server.processor_seconds() - used
    return Figures(program, place, first, whole, used, last["tokens_evaluated"], last["timings"]["prompt_n"], text)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where llama.cpp is, see setup/llama.cpp.sh")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--places", type=float, nargs="+", default=PLACES, help="parts of the file before the text")
    add_output(parser, "peers_infill")
    args = parser.parse_args()
    threads = os.cpu_count() or 1
    llama, _ = find_server("llama.cpp", "", Conditions(args.target, args.draft, args.work, threads, 1, BATCH, False))
    own = flags(sys.executable, "-m", "draftwood", "serve", args.target, "--draft", args.draft)
    plain = flags(llama, "-m", args.target, "-np", 1, "-c", CONTEXT_SIZE, "-b", BATCH, "-t", threads, "-tb", threads)
    commands = {"draftwood": own, "llama.cpp": plain, "llama.cpp, draft": (*plain, *flags("-md", args.draft))}
    found: list[Figures] = []
    with ExitStack() as stack:
        log = args.work / "infill.log"
        servers = {name: stack.enter_context(Server(command, log)) for name, command in commands.items()}
        for repeat in range(args.repeats):
            for place in args.places:
                for name, server in servers.items():
                    found.append(ask(name, server, place, repeat))
                    print(*found[-1][:-1], flush=True)
                    sleep(0.3)  # until idle threads sleep
    groups = [[each for each in found if each[:2] == (name, place)] for name in commands for place in args.places]
    best = [min(group, key=lambda each: each.whole) for group in groups]
    print(write_results(args.output, args.name, {"figures": rows_to_json(best)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
