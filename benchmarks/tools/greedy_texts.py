"""Count the greedy texts of a bundle that equal those of plain decoding, many at a time and under several settings.

python -m benchmarks.tools.greedy_texts BUNDLE --prompts questions.jsonl --output benchmarks/results
"""

from __future__ import annotations

from pathlib import Path

from rich.progress import track

from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood import LLM, SamplingParams
from draftwood.cli.bench import encode_prompts, read_prompts
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.text.tokenizer import Tokenizer

CONFIGS = {
    "chains of 4": SpeculativeConfig("chain", max_draft_len=4, budget="fixed"),
    "merged graphs of 8": SpeculativeConfig("topk", merge="gsd", max_total_draft_tokens=8, budget="fixed"),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--longest", type=int, default=200, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--limit", type=int, default=500, help="prompts (default %(default)s)")
    parser.add_argument("--at-a-time", type=int, default=8, help="texts (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of a text (default %(default)s)")
    add_output(parser, "greedy_texts")
    args = parser.parse_args()
    encoded = encode_prompts(Tokenizer.load(args.bundle), read_prompts(args.prompts), chat=True)
    prompts = [prompt for prompt in encoded if len(prompt) <= args.longest][: args.limit]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0, ignore_eos=True)
    equal = dict.fromkeys(CONFIGS, 0)
    with LLM(args.bundle) as llm:
        for start in track(range(0, len(prompts), args.at_a_time), "Decoding"):
            batch = prompts[start : start + args.at_a_time]
            plain = [result.token_ids for result in llm.generate(batch, params, speculative=None)]
            for name, config in CONFIGS.items():
                texts = [result.token_ids for result in llm.generate(batch, params, speculative=config)]
                equal[name] += sum(map(lambda *pair: pair[0] == pair[1], plain, texts))
            if start % 64 == 0:
                print(start + len(batch), equal, flush=True)
    figures = {"texts": len(prompts), "max_tokens": args.max_tokens, "at_a_time": args.at_a_time, "equal": equal}
    write_results(args.output, args.name, figures)


if __name__ == "__main__":
    main()
