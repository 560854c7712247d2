"""draftwood serve: serves a bundle through OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from rich.console import Console

from ..models.errors import ConfigError
from ..plugins.installation import install
from ..runtime.engines.shared.memory import limit_arenas
from ..runtime.llm import LLM
from ..runtime.requests.async_llm import AsyncLLM
from ..runtime.serving.collector import freeze_loaded
from ..runtime.serving.http.clients import ApiKey, read_keys
from ..runtime.serving.http.connection_limit import MAX_CONNECTIONS, raise_file_limit
from ..runtime.serving.http.hosts import AllowedHosts, is_address, is_loopback
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
    """A positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"write a number of seconds above 0, not {text!r}")
    return value


def network(text: str) -> str:
    """An address, or a network of addresses."""
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
    """A text that matches a pattern as a whole."""
    if not pattern.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{fix}, not {text!r}")
    return text


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("serve", help="answer OpenAI clients over HTTP")
    add_model(parser)
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
    words = "time limit of a request (default: none)"
    load.add_argument("--request-timeout", type=seconds, metavar="SECONDS", help=words)
    words = "time to finish requests after SIGTERM (default 60)"
    load.add_argument("--drain-timeout", type=seconds, default=60, metavar="SECONDS", help=words)
    add_decoding(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with needed_packages("draftwood serve"):
        from ..runtime.serving.app import create_app
        from ..runtime.serving.http.guard import Limits, answer_bytes
        from ..runtime.serving.http.server import bind, serve

    keys = api_keys(args.api_key, os.environ.get(API_KEY), args.api_keys_file)
    limit_arenas()
    name, config = args.served_model_name or model_of(args).name, speculative(args)
    with bind(args.host, args.port) as listener:  # before a build, which takes longer than to say that a port is taken
        bundle = bundle_for(args)
        engines = (args.threads, args.draft_threads, args.provider, args.private_weights)
        llm = LLM(bundle, config, *engines)
        warm_up(llm, Console(stderr=True))
        with (
            tracing(args.otlp_traces_endpoint, name) as trace,
            llm,
            AsyncLLM(
                llm,
                max_running=args.max_running,
                max_waiting=args.max_waiting,
                kv_cache_bytes=args.kv_cache_bytes,
                prefix_cache_slots=args.prefix_cache_slots,
                max_pause_ms=args.max_pause_ms,
            ) as async_llm,
        ):
            connections = raise_file_limit(args.max_connections)
            limits = Limits(
                args.max_body_bytes,
                min(2 * async_llm.max_requests, connections),
                keys,
                hosts=AllowedHosts.of(args.host, args.allowed_hosts, bool(keys)),
                trusted_proxies=tuple(args.trusted_proxies),
                answer_bytes=answer_bytes(),
            )
            pages = not args.no_ui
            answering = (args.request_timeout, args.allowed_origins, pages, trace, args.stored_responses)
            app = create_app(async_llm, name, limits, *answering)
            if not keys and not is_loopback(args.host):
                print(
                    f"draftwood: warning: {args.host} may be reached by others, and no --api-key is set",
                    file=sys.stderr,
                )
            if llm.stale_costs:
                print(f"draftwood: warning: {costs_note(llm.stale_costs)}", file=sys.stderr)
            host, port = listener.getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

            def started() -> None:
                page = "" if args.no_ui else f"; to talk to it: {address.removesuffix('v1')}"
                room = f"{async_llm.max_running} requests at a time"
                print(f"draftwood: model {name!r} at {address}, {room}{page}", flush=True)

            serving = serve(app, async_llm, listener, args.drain_timeout, args.log_level, started, connections)
            freeze_loaded()
            finished = asyncio.run(serving)
    if not finished:
        print("draftwood: requests were cut off when the server stopped", file=sys.stderr)
    return 0 if finished else 1


@contextmanager
def tracing(endpoint: str | None, model: str) -> Iterator[Callable[[Any], Any] | None]:
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
        yield lambda app: Tracing(app, model, provider)


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
