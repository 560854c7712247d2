"""Options that several commands have. Type, default and limits of a setting stay in its dataclass."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from ..builder.setting import Setting, flag, settings_of
from ..models.errors import ConfigError, EngineError
from ..plugins.installation import lacking
from ..runtime.bundle.cache import Model, bundle_of
from ..runtime.bundle.defaults import TEMPERATURE, TOP_P
from ..runtime.decoding.prefill import MAX_PAUSE_MS
from ..runtime.decoding.scheduler import MAX_RUNNING
from ..runtime.engines.shared.memory import CACHE_SHARE
from ..runtime.engines.shared.pool import PREFIX_CACHE_SLOTS
from ..runtime.requests.async_llm import MAX_WAITING
from ..runtime.sampling.params import SamplingParams
from ..runtime.speculation.config import SpeculativeConfig
from ..runtime.speculation.named import parse

THREADS = DRAFT_THREADS = 0  # default threads of the engines; 0 lets the backend choose
PROVIDER = "cpu"
FURTHER = "further options, "  # how titles of groups begin that only --help-all shows
HIDDEN = argparse.SUPPRESS  # a default that leaves the option out, so that the dataclass has its own
T = TypeVar("T")


SAMPLING = {
    "max_tokens": Setting("most tokens to generate", False, "the model's, else the context's room"),
    "temperature": Setting("0 is greedy", False, f"the model's, else {TEMPERATURE}"),
    "top_p": Setting("keep the most probable tokens up to this mass", False, f"the model's, else {TOP_P}"),
    "seed": Setting("the same seed gives the same text", False),
    "top_k": Setting("keep the k most probable tokens; 0 keeps all", default="the model's own, else 0"),
    "min_p": Setting("keep tokens at least this probable, relative to the best", default="the model's own, else 0"),
    "repetition_penalty": Setting(
        "divides the logits of tokens in prompt or output", default="the model's own, else 1"
    ),
    "presence_penalty": Setting("subtracted from the logits of tokens in the output"),
    "frequency_penalty": Setting("subtracted from the logits per occurrence in the output"),
    "min_tokens": Setting("no end of text before this many tokens"),
    "logprobs": Setting("report this many alternatives per token"),
    "stop": Setting("text that ends the output; may be repeated"),
    "stop_token_ids": Setting("ids that end the text, separated by commas"),
    "ignore_eos": Setting("ignore end-of-text tokens"),
}
SPECULATION = {  # the settings that people use; --speculative has all of them
    "grow": Setting("kind of proposals: chain, topk, dyspec, lookup, gsd, ...", False),
    "max_draft_len": Setting("depth of a proposal in tokens", False),
    "max_total_draft_tokens": Setting("tokens of a proposal"),
}


def integers(text: str) -> tuple[int, ...]:
    """ "1,2,4" -> (1, 2, 4)."""
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"write whole numbers separated by commas, such as 1,2,4, not {text!r}"
        ) from error


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"write a whole number, at least 1, not {text!r}")
    return value


def positive_or_all(text: str) -> int | str:
    """A whole number of at least 1, or "all"."""
    return text if text == "all" else positive(text)


def valid_text(text: str) -> str:
    """Text of a command line, in which Python leaves half of a surrogate pair for a byte that it cannot decode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"write text in UTF-8, which {text!r} is not") from error
    return text


def folder_or_id(text: str) -> Path:
    """A path. One that begins with a dot stays a path: without the dot it could be an id."""
    return Path.cwd() / text if text.startswith(".") else Path(text)


class AsTuple(argparse.Action):
    """Stores several values as a tuple, for a frozen dataclass."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(values))


READERS: dict[str, dict[str, Any]] = {  # how argparse reads a field, by its annotation without None
    "int": {"type": int, "metavar": "N"},
    "Count": {"type": positive_or_all, "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    "str": {"metavar": "NAME"},
    "bool": {"action": "store_true"},
    "Path": {"type": folder_or_id, "metavar": "PATH"},
    "Sequence[str]": {"action": "append", "type": valid_text, "metavar": "TEXT"},
    "tuple[int, ...]": {"type": integers, "metavar": "N,N"},
    "tuple[str, ...]": {"nargs": "+", "action": AsTuple, "metavar": "X"},
    "bool | None": {"action": argparse.BooleanOptionalAction},
}


def add_settings(
    parser: argparse.ArgumentParser, title: str, kind: Callable[..., Any], shown: Mapping[str, Setting] | None = None
) -> argparse._ArgumentGroup:
    """Add options for fields of a dataclass, in two groups, the first for everybody. shown: None: the fields' own."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    groups = [parser.add_argument_group(start + title) for start in ("", FURTHER)]
    for name, setting in (settings_of(kind) if shown is None else shown).items():
        default, annotation = setting.default or known[name].default, str(known[name].type)
        suffix = "" if default in (None, (), False, MISSING) else f" (default: {default})"
        reader = READERS.get(annotation) or READERS[annotation.removesuffix(" | None")]
        groups[setting.is_further].add_argument(flag(name), default=HIDDEN, help=setting.help + suffix, **reader)
    return groups[0]


def read_options(args: argparse.Namespace, kind: Callable[..., T]) -> T:
    """Make the dataclass from the given options, with its own defaults for the others."""
    return kind(**given(args, kind))


def given(args: argparse.Namespace, kind: Callable[..., Any]) -> dict[str, Any]:
    """The given options that are fields of a dataclass."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return {name: value for name, value in vars(args).items() if name in names}


@contextmanager
def needed_packages(purpose: str) -> Iterator[None]:
    """Where packages are imported that not every installation has. Raises EngineError without them."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise EngineError(f"{purpose} needs {lacking(error)}") from error


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="only results and errors: no progress, no notes")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add what is run: a bundle, or a model whose bundle is built at its first use."""
    parser.add_argument("model", metavar="MODEL", help="bundle, .gguf file, Hugging Face folder, or id on the Hub")
    group = parser.add_argument_group("model, unless it is a bundle (the first use builds one, and keeps it)")
    words = "smaller model that proposes tokens; or none (default: a known one)"
    group.add_argument("--draft", metavar="PATH", help=words)
    group.add_argument("--precision", metavar="NAME", help="int4, int8, bf16, ... (default: nearest to the file's own)")
    names = ("-c", "--ctx-size", "--max-length")
    words = "tokens of prompt and output (default: the model's, up to 8192)"
    group.add_argument(*names, dest="max_length", type=positive, metavar="N", help=words)


def model_of(args: argparse.Namespace) -> Model:
    return Model(args.model, args.draft, args.precision, args.max_length)


def bundle_for(args: argparse.Namespace) -> Path:
    return bundle_of(model_of(args), getattr(args, "quiet", False))


def add_sampling(parser: argparse.ArgumentParser, **changed: Setting) -> None:
    """Add every field of SamplingParams that a command line can express. changed: settings that differ here."""
    add_settings(parser, "sampling", SamplingParams, SAMPLING | changed)


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Add --speculative for every setting of SpeculativeConfig, options for three of them, and the switch."""
    group = add_settings(parser, "speculation", SpeculativeConfig, SPECULATION)
    group.add_argument(
        "--speculative", metavar="SETTINGS", help="any settings: gsd, topk:8, grow=topk,merge=gsd, or a JSON object"
    )
    group.add_argument("--no-speculation", action="store_true", help="decode plainly, without the draft")


def add_limits(group: argparse._ArgumentGroup) -> None:
    """Add what every server of many requests has: the limits of AsyncLLM."""
    words = f"requests that may wait; further ones are refused (default {MAX_WAITING})"
    group.add_argument("--max-waiting", type=int, default=MAX_WAITING, help=words)
    words = (
        "lower --max-running to the caches that fit into this memory (default: requests wait until caches fit into "
        f"{100 * CACHE_SHARE:.0f} %% of the available memory)"
    )
    group.add_argument("--kv-cache-bytes", type=positive, help=words)
    words = (
        "the most time that a running text waits for the prompts of others between two of its chunks, by the measured "
        f"costs of the bundle (default {MAX_PAUSE_MS:g})"
    )
    group.add_argument("--max-pause-ms", type=float, default=MAX_PAUSE_MS, metavar="MS", help=words)
    words = f"slots for prompts of ended requests, which others reuse; 0: none (default {PREFIX_CACHE_SLOTS})"
    group.add_argument("--prefix-cache-slots", type=int, default=PREFIX_CACHE_SLOTS, metavar="SLOTS", help=words)
    words = "copy weights into memory, so that changes of the bundle do not reach it; not for TensorRT, which maps none"
    group.add_argument("--private-weights", action="store_true", help=words)


def add_running(group: argparse._ActionsContainer) -> None:
    words = f"requests that run together (default {MAX_RUNNING})"
    group.add_argument("--max-running", type=int, default=MAX_RUNNING, metavar="N", help=words)


def add_engines(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(FURTHER + "engines")
    group.add_argument("--threads", type=int, default=THREADS, help="threads of the target; 0 lets the backend choose")
    group.add_argument(
        "--draft-threads", type=int, default=DRAFT_THREADS, help="of the draft; 0: one, or on native the target's"
    )
    group.add_argument("--provider", choices=("cpu", "cuda"), default=PROVIDER, help="the device of ONNX Runtime")


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """Add what every command has that generates text: speculation and engines."""
    add_speculation(parser)
    add_engines(parser)


def speculative(args: argparse.Namespace) -> SpeculativeConfig | None:
    """The settings of speculation; None for plain decoding. Raises ConfigError for those that contradict each other."""
    chosen = given(args, SpeculativeConfig)
    options = [flag(name) for name in chosen] + (["--speculative"] if args.speculative is not None else [])
    useless = [*options, *(["--draft-threads"] if args.draft_threads else [])]
    if args.no_speculation and useless:
        raise ConfigError(f"--no-speculation makes {useless[0]} useless: leave one of them out")
    if args.speculative is not None and chosen:
        raise ConfigError(f"{options[0]} is a setting of --speculative, too: write both into --speculative")
    if args.no_speculation:
        return None
    return SpeculativeConfig(**chosen) if args.speculative is None else parse(args.speculative)
