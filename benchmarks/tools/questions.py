"""Questions of several files of JSON lines, chosen the same way by every benchmark.

    python -m benchmarks.tools.questions MT_BENCH.jsonl GSM8K.jsonl HUMANEVAL.jsonl --output build/questions.jsonl

Each line of a file has a "prompt" or "turns". The output has --num questions of each file, the files in turn.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.tools.record import make_parser


def choose_questions(file: Path, num: int) -> list[str]:
    """`num` questions of a file at equal distances, the first turn of each."""
    lines = file.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines[:: max(1, len(lines) // num)][:num]]
    return [record["prompt"] if "prompt" in record else record["turns"][0] for record in records]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="JSON lines")
    parser.add_argument("--num", type=int, default=8, help="questions of each file (default %(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    chosen = [choose_questions(file, args.num) for file in args.files]
    lines = [json.dumps({"prompt": question}) + "\n" for row in zip(*chosen, strict=True) for question in row]
    args.output.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
