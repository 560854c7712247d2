"""draftwood bench: compares configurations with plain decoding, on the user's own prompts and machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..builder.setting import Setting
from ..models import errors
from ..models.bindings import TARGET
from ..models.errors import RequestError
from ..models.plain_files import lines_of
from ..runtime.bundle.bundle import EngineBundle
from ..runtime.bundle.costs import assumed_costs, fingerprint, stored_costs
from ..runtime.bundle.defaults import default_params
from ..runtime.bundle.fit import fitted
from ..runtime.decoding.decoder import SpeculativeDecoder
from ..runtime.decoding.stats import SpecDecodeStats
from ..runtime.engines.base import Engine
from ..runtime.inspection.speeds import Row, Run, summarise
from ..runtime.prompt import check_prompt
from ..runtime.sampling.params import SamplingParams
from ..runtime.sampling.random import seeded_streams
from ..runtime.sampling.sampler import Sampler
from ..runtime.speculation.named import PLAIN, parse
from ..runtime.speculation.planning.cost import CostModel
from ..runtime.speculation.planning.drift import Drift
from ..runtime.speculation.planning.history import History
from ..runtime.text.tokenizer import Tokenizer
from .files import check_writable, files_of, read, write
from .live import costs_note
from .options import add_engines, add_model, add_quiet, add_sampling, bundle_for, given, positive
from .streams import say

NAME_WIDTH = 10  # columns of a terminal that a configuration's name has at least
MAX_TOKENS = 96  # of a text, where nothing else is said
QUESTIONS = Path(errors.__file__).with_name("demo") / "smollm2" / "prompts.jsonl"
CONFIGS, WITHOUT_DRAFT = "plain,chain:4,topk:12,auto", "plain,lookup:8,auto"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="compare configurations with plain decoding")
    add_model(parser)
    words = 'JSON lines, each with a "prompt" or "turns" (default: questions of this package)'
    parser.add_argument("--prompts", type=Path, help=words)
    add_chat(parser)
    parser.add_argument("--configs", help=f"separated by commas (default {CONFIGS}, without a draft {WITHOUT_DRAFT})")
    parser.add_argument("--repeats", type=positive, default=3, help="of every prompt and configuration (default 3)")
    parser.add_argument("--limit", type=positive, help="use only the first so many prompts")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_sampling(parser, max_tokens=Setting("tokens of a text", False, f"{MAX_TOKENS}"))
    add_engines(parser)
    add_quiet(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    chosen = given(args, SamplingParams)
    params = SamplingParams(**chosen)
    if params.stop:
        raise RequestError("--stop ends texts, and bench measures tokens: use --stop-token-ids or --max-tokens")
    if params.logprobs is not None:
        raise RequestError("--logprobs changes no figure of bench: leave it out, or ask generate --json for them")
    bundle = EngineBundle.open(bundle_for(args))
    params = replace(default_params(bundle), **{"max_tokens": MAX_TOKENS} | chosen)
    if args.output is not None:
        check_writable(args.output, "--output", (args.prompts, *files_of(bundle)))
    tokenizer = Tokenizer.load(bundle.folder)
    chat = args.chat or (args.prompts is None and tokenizer.has_chat_template)
    texts = read_prompts(args.prompts or QUESTIONS)[: args.limit]
    prompts = [check_prompt(prompt, bundle) for prompt in encode_prompts(tokenizer, texts, chat)]
    default = CONFIGS if bundle.has_draft else WITHOUT_DRAFT
    asked = default if args.configs is None else args.configs
    configs = {name: parse(name) for name in dict.fromkeys([PLAIN, *asked.split(",")])}
    target = bundle.open_engine(TARGET, args.threads, args.provider)
    opens_draft = bundle.has_draft or args.draft_threads  # which would be ignored
    draft = bundle.open_draft(args.threads, args.draft_threads, args.provider) if opens_draft else None
    costs = costs_of(bundle, target, draft, args)
    eos, vocab_size = bundle.manifest.eos_token_ids, target.spec.model.vocab_size

    def decoders() -> dict[str, SpeculativeDecoder]:
        """Each with a history of its own, which is empty."""
        found = {}
        for name, config in configs.items():
            own, longest = None if config is None else fitted(config, bundle), bundle.manifest.max_length
            history = History(Drift(costs))
            found[name] = SpeculativeDecoder(target, draft, own, longest, eos, costs, history=history)
        return found

    def decode(decoder: SpeculativeDecoder, index: int) -> Run:
        sampler, stats = Sampler(params, prompts[index], eos, vocab_size), SpecDecodeStats()
        seed = params.seed if params.seed is not None else index
        for _ in decoder.generate(prompts[index], sampler, seeded_streams(seed), stats):
            pass
        return Run(sampler.output, stats)

    work = f"{len(configs)} settings, {args.repeats} × {len(prompts)} texts of up to {params.max_tokens} tokens"
    say(Console(stderr=True, quiet=args.quiet), f"── Measuring {work}")
    for decoder in decoders().values():  # binds buffers; what it learns is forgotten
        decode(decoder, 0)
    runs: dict[str, list[Run]] = {name: [] for name in configs}
    measured, order, console = decoders(), args.repeats * [*range(len(prompts))], Console(stderr=args.json)
    for index in track(order, "Measuring", console=console, transient=True, disable=args.quiet):
        for name, decoder in measured.items():
            runs[name].append(decode(decoder, index))
    rows = [summarise(name, runs[name], runs[PLAIN], len(prompts)) for name in configs]
    report = {
        "date": date.today().isoformat(),
        "bundle": bundle.folder.name,
        "machine": fingerprint(bundle.manifest, args.provider, args.threads, args.draft_threads),
        "temperature": params.temperature,
        "prompts": len(prompts),
        "repeats": args.repeats,
        "rows": [row._asdict() for row in rows],
    }
    if args.output is not None:
        write(args.output, "--output", json.dumps(report, indent=2) + "\n")
    if args.json:
        print(json.dumps(report))
    else:
        console.print(table(rows, greedy=params.greedy))
    return 0


def costs_of(bundle: EngineBundle, target: Engine, draft: Engine | None, args: argparse.Namespace) -> CostModel:
    """The costs by which rounds are planned. Prints a note if they were measured on another machine or bundle."""
    measured, stale = stored_costs(bundle, args.provider, args.threads, args.draft_threads)
    if stale:
        console = Console(stderr=True, quiet=args.quiet)
        say(console, f"── {costs_note(stale)}")
    return measured or assumed_costs(target.spec, None if draft is None else draft.spec, args.provider)


def table(rows: Sequence[Row], greedy: bool) -> Table:
    """The rows as a table. Only greedy texts are compared, because sampled texts differ by chance."""
    columns = [
        "",
        "mean\naccepted\nlength",
        "target\npasses\n/ token",
        "draft\npasses\n/ token",
        "tokens/s",
        "× plain\n(95 %)",
        "with\nprompt",
    ]
    result = Table(*columns, *(["same\ntext"] if greedy else []), box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for column in result.columns[1:]:
        column.no_wrap, column.justify = True, "right"
    result.columns[0].min_width, result.columns[0].overflow = NAME_WIDTH, "fold"
    for row in rows:
        cells = [row.config, f"{row.mean_acceptance_length:.2f}"]
        cells += [f"{row.target_passes_per_token:.2f}", f"{row.draft_passes_per_token:.2f}"]
        ends = "" if row.speed_interval is None else "\n{:.2f}–{:.2f}".format(*row.speed_interval)
        cells += [f"{row.tokens_per_second:.0f}", f"{row.speed:.2f}{ends}", f"{row.speed_whole:.2f}"]
        result.add_row(*cells, *([f"{row.same_text:.0%}"] if greedy else []))
    return result


def add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chat", action="store_true", help="put every prompt through the model's chat template")


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str], chat: bool) -> list[list[int]]:
    """Token ids of each text. chat: as a user's message. Raises RequestError, also without a chat template."""
    if not chat:
        return [tokenizer.encode(text) for text in texts]
    if not tokenizer.has_chat_template:
        raise RequestError("this model has no chat template, which --chat needs: leave --chat out")
    written = (tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts)
    return [tokenizer.encode(text, add_special_tokens=False) for text in written]


def read_prompts(file: Path) -> list[str]:
    """The prompts of a JSON lines file. Raises RequestError that names the line."""
    prompts = []
    for number, line in lines_of(read(file, "--prompts")):
        try:
            row = json.loads(line)
            prompt = row["prompt"] if "prompt" in row else row["turns"][0]
        except (ValueError, TypeError, LookupError, RecursionError):
            prompt = None
        if not isinstance(prompt, str):
            raise RequestError(f'{file}, line {number}: expected an object with a "prompt", which is text')
        prompts.append(prompt)
    if not prompts:
        raise RequestError(f"{file} holds no prompts")
    return prompts
