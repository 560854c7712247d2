"""draftwood serve: serves a bundle through OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from rich.console import Console

from ..models.errors import ConfigError
from ..plugins.installation import install
from ..runtime.bundle.bundle import MANIFEST
from ..runtime.bundle.cache import CONFIG, Model, is_buildable, is_gguf
from ..runtime.engines.shared.memory import limit_arenas
from ..runtime.llm import LLM
from ..runtime.requests.async_llm import AsyncLLM
from ..runtime.requests.models import Models, Opener
from ..runtime.serving.collector import freeze_loaded
from ..runtime.serving.http.clients import ApiKey, read_keys
from ..runtime.serving.http.connection_limit import MAX_CONNECTIONS, raise_file_limit
from ..runtime.serving.http.hosts import AllowedHosts, is_address, is_loopback
from ..runtime.speculation.config import SpeculativeConfig
from .live import costs_note
from .options import (
    FURTHER,
    add_decoding,
    add_limits,
    add_model,
    add_running,
    bundle_for,
    model_of,
    needed_packages,
    positive,
    speculative,
)
from .progress import warm_up

API_KEY = "DRAFTWOOD_API_KEY"
NAMELESS = "default"  # the client's name of the key of --api-key
MAX_BODY_BYTES = 4 << 20
HOST_NAME = re.compile(r"\*|(?:\*\.)?[^\s:/*\[\]?#@]+")
URL, NAME = re.compile(r"https?://[^/\s]\S*"), re.compile(r".+", re.DOTALL)
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[^\s:/*\[\]?#@]+)(?::[0-9]+)?")


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"write a number of seconds above 0, not {text!r}")
    return value


def network(text: str) -> str:
    try:
        return str(ip_network(text, strict=False))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"write an address or a network such as 10.0.0.0/8, not {text!r}") from error


def host_name(text: str) -> str:
    """A name in the header Host, or a pattern of names. Any other text would match no request."""
    return (
        text
        if is_address(text)
        else matching(HOST_NAME, text, "write a name without scheme, port and path, *.NAME, or *")
    )


def origin(text: str) -> str:
    """An origin as browsers send it. Any other text would match no page."""
    return matching(ORIGIN, text.lower(), "write scheme, name and port alone, such as http://localhost:3000, or *")


def url(text: str) -> str:
    """An address that spans can be sent to."""
    return matching(URL, text, "write an address such as http://localhost:4318/v1/traces")


def model_name(text: str) -> str:
    return matching(NAME, text, "the name is empty: leave the option out to use the model's file or folder")


def matching(pattern: re.Pattern[str], text: str, fix: str) -> str:
    if not pattern.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{fix}, not {text!r}")
    return text


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("serve", help="answer OpenAI clients over HTTP")
    add_model(parser)
    words = "further models, or instead of all a folder of them: each is opened when a request names it"
    parser.add_argument("more_models", nargs="*", metavar="MODEL", help=words)
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    http.add_argument("--port", type=int, default=8000, help="0 takes a free port (default 8000)")
    words = "the model's name in requests (default: the model's file or folder)"
    http.add_argument("--served-model-name", type=model_name, metavar="NAME", help=words)
    http.add_argument("--api-key", metavar="KEY", help=f"the key of clients (default: the variable {API_KEY}, if set)")
    add_running(http)
    http = parser.add_argument_group(FURTHER + "HTTP")
    words = "further keys, a line each: a client's name, a space, its key"
    http.add_argument("--api-keys-file", type=Path, metavar="FILE", help=words)
    words = (
        "host names of this server, such as llm.example.com, *.example.com or * for any; always allowed are localhost "
        "and, unless it listens on this machine only, addresses (default with a key: any)"
    )
    http.add_argument("--allowed-hosts", nargs="+", type=host_name, default=(), metavar="NAME", help=words)
    words = "proxies whose X-Forwarded-For names the sender of a request, such as 10.0.0.0/8 (default: none)"
    http.add_argument("--trusted-proxies", nargs="+", type=network, default=(), metavar="ADDRESS", help=words)
    words = f"beyond this limit idle connections are closed, and requests refused (default {MAX_CONNECTIONS})"
    http.add_argument("--max-connections", type=int, default=MAX_CONNECTIONS, help=words)
    words = f"limit of one request (default {MAX_BODY_BYTES})"
    http.add_argument("--max-body-bytes", type=positive, default=MAX_BODY_BYTES, help=words)
    words = "origins of web pages whose scripts may use it, such as http://localhost:3000, or * (default: none)"
    http.add_argument("--allowed-origins", nargs="+", type=origin, default=(), metavar="ORIGIN", help=words)
    words = "answers of /v1/responses that are kept in memory, for previous_response_id (default: none)"
    http.add_argument("--stored-responses", type=positive, default=0, metavar="N", help=words)
    http.add_argument("--no-ui", action="store_true", help="no web pages: neither the chat page / nor /docs")
    words = "send OpenTelemetry spans there (default: as the variables OTEL_… say, else none)"
    http.add_argument("--otlp-traces-endpoint", type=url, metavar="URL", help=words)
    http.add_argument("--log-level", choices=("error", "warning", "info"), default="warning", help="info logs requests")
    load = parser.add_argument_group(FURTHER + "load")
    add_limits(load)
    words = "models that are open at a time; others are closed (default: those for which there is memory)"
    load.add_argument("--max-loaded", type=positive, metavar="N", help=words)
    words = "time limit of a request (default: none)"
    load.add_argument("--request-timeout", type=seconds, metavar="SECONDS", help=words)
    words = "time to finish requests after SIGTERM (default 60)"
    load.add_argument("--drain-timeout", type=seconds, default=60, metavar="SECONDS", help=words)
    add_decoding(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with needed_packages("draftwood serve"):
        from ..runtime.serving.app import create_app, create_app_of_several
        from ..runtime.serving.http.guard import Limits, answer_bytes
        from ..runtime.serving.http.server import bind, serve

    keys = api_keys(args.api_key, os.environ.get(API_KEY), args.api_keys_file)
    limit_arenas()
    chosen, config = models_of(args), speculative(args)
    with (
        bind(args.host, args.port) as listener,  # before a build, which takes longer than to say that a port is taken
        ExitStack() as stack,
    ):
        connections = raise_file_limit(args.max_connections)
        at_a_time = args.max_running + args.max_waiting
        engine: AsyncLLM | Models
        if len(chosen) == 1:
            (name,) = chosen
            llm = LLM(bundle_for(args), config, args.threads, args.draft_threads, args.provider, args.private_weights)
            warm_up(llm, Console(stderr=True))
            stack.enter_context(llm)
            engine = stack.enter_context(AsyncLLM(llm, **limits_of(args)))
            at_a_time, room = engine.max_requests, f", {engine.max_running} requests at a time"
            if llm.stale_costs:
                print(f"draftwood: warning: {costs_note(llm.stale_costs)}", file=sys.stderr)
        else:
            name, room = " ".join(chosen), ", opened when they are named"
            engine = Models({name: opener(args, model, config) for name, model in chosen.items()}, args.max_loaded)
            stack.callback(engine.close)
        limits = Limits(
            args.max_body_bytes,
            min(2 * at_a_time, connections),
            keys,
            hosts=AllowedHosts.of(args.host, args.allowed_hosts, bool(keys)),
            trusted_proxies=tuple(args.trusted_proxies),
            answer_bytes=answer_bytes(),
        )
        trace = stack.enter_context(tracing(args.otlp_traces_endpoint))
        http = (limits, args.request_timeout, args.allowed_origins)
        if isinstance(engine, Models):
            app, pages = create_app_of_several(engine, *http, trace, args.stored_responses), False
        else:
            pages = not args.no_ui
            app = create_app(engine, name, *http, pages, trace, args.stored_responses)
        if not keys and not is_loopback(args.host):
            print(f"draftwood: warning: {args.host} may be reached by others, and no --api-key is set", file=sys.stderr)
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

        def started() -> None:
            page = f"; to talk to it: {address.removesuffix('v1')}" if pages else ""
            print(f"draftwood: model {name!r} at {address}{room}{page}", flush=True)

        serving = serve(app, engine, listener, args.drain_timeout, args.log_level, started, connections)
        freeze_loaded()
        finished = asyncio.run(serving)
    if not finished:
        print("draftwood: requests were cut off when the server stopped", file=sys.stderr)
    return 0 if finished else 1


def limits_of(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_running", "max_waiting", "kv_cache_bytes", "prefix_cache_slots", "max_pause_ms")
    return {name: getattr(args, name) for name in names}


def models_of(args: argparse.Namespace) -> dict[str, Model]:
    """What is served, by name. A folder of several models stands for them. Raises ConfigError."""
    paths = [str(path) for each in (args.model, *args.more_models) for path in inside(Path(each)) or (each,)]
    if len(paths) == 1:
        if args.max_loaded is not None:
            raise ConfigError("--max-loaded is for several models: leave it out")
        args.model = paths[0]
        return {args.served_model_name or model_of(args).name: model_of(args)}
    given = {"--draft": args.draft, "--served-model-name": args.served_model_name}
    if option := next((option for option, value in given.items() if value is not None), None):
        raise ConfigError(f"{option} is of one model, and {len(paths)} are given: leave it out")
    models = [Model(path, None, args.precision, args.max_length) for path in paths]
    found = {model.name: model for model in models}
    if len(found) < len(paths):
        raise ConfigError("two of the models have the same name: rename the file or folder of one")
    return found


def inside(folder: Path) -> list[Path]:
    """The models in a folder that is none itself."""
    if not folder.is_dir() or any((folder / name).is_file() for name in (MANIFEST, CONFIG)):
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if (is_gguf(path) and path.is_file()) or any((path / name).is_file() for name in (MANIFEST, CONFIG))
    )


def opener(args: argparse.Namespace, model: Model, config: SpeculativeConfig | None) -> Opener:
    """How one of several models is opened. It takes options of a build only if it is no bundle."""
    path = Path(model.path)
    files = [each for each in path.iterdir() if each.is_file()] if path.is_dir() else [path] if path.is_file() else []
    chosen = model if is_buildable(path) else Model(model.path)
    options = {
        "speculative": config,
        "threads": args.threads,
        "draft_threads": args.draft_threads,
        "provider": args.provider,
        "private_weights": args.private_weights,
        "precision": chosen.precision,
        "max_length": chosen.max_length,
    }
    opened = partial(AsyncLLM, model.path, **limits_of(args), **options)
    return Opener(opened, sum(file.stat().st_size for file in files))


@contextmanager
def tracing(endpoint: str | None) -> Iterator[Callable[[Any, str], Any] | None]:
    """The middleware that records spans; None if none are wanted. Raises ConfigError if its packages are missing."""
    if not spans_wanted(endpoint, os.environ):
        yield None
        return
    try:
        from ..runtime.serving.openai.tracing import Tracing, sending
    except ImportError as error:
        missing = f"OpenTelemetry spans need {error.name}: {install('otel')}"
        if endpoint is not None:
            raise ConfigError(missing) from error
        print(f"draftwood: warning: no spans are sent. {missing}", file=sys.stderr)
        yield None
        return
    with sending(endpoint) as provider:
        yield lambda app, model: Tracing(app, model, provider)


def spans_wanted(endpoint: str | None, variables: Mapping[str, str]) -> bool:
    """Whether spans are to be sent, by --otlp-traces-endpoint or by OpenTelemetry's variables."""
    if variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = variables.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    named = any(variables.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT") for kind in ("", "TRACES_"))
    return endpoint is not None or exporter == "otlp" or (named and not exporter)


def api_keys(option: str | None, variable: str | None, file: Path | None) -> tuple[ApiKey, ...]:
    """All API keys. Raises ConfigError for an empty key, with which the server would need no key."""
    keys = [] if file is None else read_keys(file)
    if option is not None:
        keys.append(ApiKey.of(NAMELESS, option, "--api-key"))
    elif variable is not None:
        keys.append(ApiKey.of(NAMELESS, variable, f"the variable {API_KEY}"))
    return tuple(keys)
