"""JSON by five schemas that tools use: the default settings over plain decoding of the same forms.

python -m benchmarks.structured BUNDLE --output benchmarks/results
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood import LLM, SamplingParams, StructuredOutput


def object_of(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has exactly these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


TEXT, WHOLE, NUMBER = {"type": "string", "maxLength": 200}, {"type": "integer"}, {"type": "number"}
PLACE = object_of(street=TEXT, city=TEXT, postal_code=TEXT)
LINE = object_of(item=TEXT, quantity=WHOLE, unit_price=NUMBER)
LINES = {"type": "array", "minItems": 2, "maxItems": 3, "items": LINE}
CHANGES = {"type": "array", "minItems": 1, "maxItems": 2, "items": object_of(old_text=TEXT, new_text=TEXT)}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "call": ("Weather in Paris, in Celsius, for three days.", object_of(location=TEXT, unit=TEXT, days=WHOLE)),
    "appointment": (
        "Dentist for Ann Smith on 3 May 2027 at 9:30, half an hour, 5 Mill Lane, Leeds, LS1 4AP.",
        object_of(name=TEXT, date=TEXT, start_time=TEXT, duration_minutes=WHOLE, address=PLACE),
    ),
    "query": (
        "SQL: the ten customers with the highest total of orders in 2026.",
        object_of(database=TEXT, query=TEXT, explanation=TEXT),
    ),
    "edit": (
        "In main.py rename the function `add(a, b)` to `total(a, b)`: def add(a, b):\n    return a + b\n",
        object_of(file_path=TEXT, changes=CHANGES),
    ),
    "invoice": (
        "Invoice 1042 for Bolt Ltd, 1 High Street, York, YO1 9AA: 3 hammers at 12.50, 20 nails at 0.10.",
        object_of(invoice_number=TEXT, customer_name=TEXT, billing_address=PLACE, lines=LINES, total=NUMBER),
    ),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeats", type=int, default=3, help="of each form (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=160, help="of a text (default %(default)s)")
    add_output(parser, "structured")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with LLM(args.bundle) as llm:
        for name, (question, schema) in FORMS.items():
            form = StructuredOutput(json=schema)
            params = SamplingParams(max_tokens=args.max_tokens, temperature=0, structured=form)
            messages = [{"role": "user", "content": f"{question}\nAnswer in JSON."}]
            speeds: dict[str, list[float]] = {"plain": [], "default": []}
            for _ in range(args.repeats):
                plain, other = (llm.chat(messages, params, speculative=each)[0] for each in (None, "own"))
                assert plain.token_ids == other.token_ids
                speeds["plain"].append(plain.stats.tokens_per_second)
                speeds["default"].append(other.stats.tokens_per_second)
            ratio = median(map(lambda own, plain: own / plain, speeds["default"], speeds["plain"]))
            stats = other.stats
            results[name] = {
                "tokens": stats.num_tokens,
                **{each: round(median(found), 1) for each, found in speeds.items()},
                "ratio": round(ratio, 2),
                "target_passes_per_token": round(stats.target_passes / stats.num_tokens, 3),
                "draft_passes_per_token": round(stats.draft_passes / stats.num_tokens, 3),
            }
            print(name, results[name], flush=True)
    write_results(args.output, args.name, {"bundle": args.bundle.name, "repeats": args.repeats, "results": results})


if __name__ == "__main__":
    main()
