"""draftwood generate: generates text, with a live view in a terminal, plain in a pipe, or as one JSON object."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..models.errors import RequestError
from ..runtime.bundle.bundle import EngineBundle
from ..runtime.bundle.defaults import TEMPERATURE
from ..runtime.inspection.audit import AuditReport, audit_output, check_auditable
from ..runtime.inspection.explain import RoundRecorder
from ..runtime.inspection.explain_html import to_html
from ..runtime.llm import LLM
from ..runtime.sampling.params import SamplingParams
from ..runtime.sampling.structured import StructuredOutput
from ..runtime.text.tokenizer import token_texts
from . import options
from .files import check_writable, files_of, read, write
from .live import costs_note, open_view, summary
from .streams import read_input, say


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("generate", help="complete a prompt")
    options.add_model(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", type=options.valid_text, help="text to complete")
    prompt.add_argument("--prompt-file", metavar="FILE", help="file with the text to complete; - reads standard input")
    prompt.add_argument(
        "--chat",
        metavar="TEXT",
        type=options.valid_text,
        help="a user's message, put through the model's chat template",
    )
    form = parser.add_argument_group(options.FURTHER + "form of the text").add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", type=Path, help="the text is JSON that fits this schema")
    form.add_argument(
        "--regex", metavar="PATTERN", type=options.valid_text, help="the whole text matches this regular expression"
    )
    form.add_argument("--grammar", metavar="FILE", type=Path, help="the text follows this grammar, Lark's or GBNF's")
    words = "one JSON object: the fields of CompletionOutput, and the prompt's tokens"
    parser.add_argument("--json", action="store_true", help=words)
    parser.add_argument("--explain", metavar="OUT.html", type=Path, help="draw every round's token graph on a page")
    check = parser.add_argument_group(options.FURTHER + "check")
    check.add_argument("--audit", action="store_true", help="decode plainly too and compare; exit code 1 if different")
    options.add_sampling(parser)
    options.add_decoding(parser)
    options.add_quiet(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if hasattr(args, "logprobs") and not args.json:
        raise RequestError("--logprobs needs --json: a text alone shows no log-probabilities")
    chosen = options.given(args, SamplingParams) | {"structured": form_of(args)}
    SamplingParams(**chosen)  # raises before the model is opened
    config = options.speculative(args)
    text = prompt_text(args)
    if args.audit:
        check_auditable(config is not None, SamplingParams(**{"temperature": TEMPERATURE} | chosen))
    bundle = options.bundle_for(args)
    if args.explain is not None:
        read_files = (args.json_schema, args.grammar, args.prompt_file and Path(args.prompt_file))
        check_writable(args.explain, "--explain", (*read_files, *files_of(EngineBundle.open(bundle))))
    notes, errors = Console(stderr=True, quiet=args.quiet), Console(stderr=True)
    with LLM(bundle, config, args.threads, args.draft_threads, args.provider) as llm:
        params = replace(llm.get_default_sampling_params(), **chosen)
        if llm.stale_costs:
            say(notes, f"── {costs_note(llm.stale_costs)}")
        if args.chat is not None and not llm.tokenizer.has_chat_template:
            raise RequestError("this model has no chat template, which --chat needs: use --prompt")
        prompt = llm.encode(text) if args.chat is None else llm.encode_chat([{"role": "user", "content": args.chat}])
        recorder = RoundRecorder(token_texts(llm.tokenizer))
        observe = None if args.explain is None else recorder.observe
        fields: dict[str, Any] = {}
        if args.json:
            (result,) = llm.generate(prompt, params, observe=observe)
            token_ids, stats, fields = result.token_ids, result.stats, result.to_dict()
        else:
            token_ids = []
            with open_view(Console(), text) as view:
                for chunk in llm.stream(prompt, params, observe):
                    token_ids += chunk.token_ids
                    view.show(chunk)
            stats = chunk.stats
            say(notes, summary(stats))
        if args.explain is not None:
            write(args.explain, "--explain", to_html(recorder.explanation(text, config, params, stats)))
            say(notes, f"── {len(recorder.rounds)} rounds explained in {args.explain}")
        report = audit_output(llm, prompt, params, token_ids) if args.audit else None
    if report is not None:
        fields["audit"] = report.to_dict()
        errors.print(f"── {verdict(report)}", highlight=False)
    if args.json:
        print(json.dumps(fields))
    return 0 if report is None or report.equal else 1


def verdict(report: AuditReport) -> str:
    if report.equal:
        return f"audit: all {report.num_tokens} tokens are those of plain decoding"
    tokens = f"{report.speculative_token} instead of {report.plain_token}"
    where = f"audit: token {report.position + 1 if report.position is not None else 0} differs ({tokens})"
    if report.logit_gap is None:
        return f"{where}: one of the two outputs ended there"
    judged = "numeric noise of passes of different widths" if report.numeric_noise else "a bug: please report it"
    return f"{where}; their logits are {report.logit_gap:.2g} apart, {judged}"


def prompt_text(args: argparse.Namespace) -> str:
    """The prompt of the used option. Raises RequestError if it cannot be read."""
    if args.prompt_file is None:
        return str(args.prompt if args.chat is None else args.chat)
    return read_input() if args.prompt_file == "-" else read(Path(args.prompt_file), "--prompt-file")


def form_of(args: argparse.Namespace) -> StructuredOutput | None:
    """The form that the options demand of the text. Raises RequestError."""
    if args.json_schema is not None:
        return StructuredOutput(json=read(args.json_schema, "--json-schema"))
    if args.grammar is not None:
        return StructuredOutput(grammar=read(args.grammar, "--grammar"))
    return None if args.regex is None else StructuredOutput(regex=args.regex)
