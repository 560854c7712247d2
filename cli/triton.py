"""draftwood triton: writes a bundle as a model of Triton Inference Server, and can start a local server for it."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from ..models.errors import ConfigError, EngineError
from ..runtime.serving.triton.contract import ModelSettings
from ..runtime.serving.triton.repository import Placement, write_model
from ..runtime.serving.triton.server import Distribution, Ports, TritonServer
from .options import FURTHER, add_decoding, add_limits, add_model, add_running, bundle_for, integers, speculative
from .streams import say

HOST = "127.0.0.1"
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("triton", help="write a model for Triton Inference Server, and run one")
    add_model(parser)
    parser.add_argument("--output", metavar="REPOSITORY", type=Path, required=True, help="the model repository")
    parser.add_argument("--name", default="draftwood", help="name of the model (default draftwood)")
    parser.add_argument("--copy-bundle", action="store_true", help="make the repository independent of the bundle")
    placement = parser.add_argument_group("placement")
    placement.add_argument("--instances", type=int, default=1, help="processes per device, each with its own engines")
    placement.add_argument("--gpus", type=integers, default=(), help="devices to run on with CUDA, such as 0,1")
    limits = parser.add_argument_group("limits of each instance")
    add_running(limits)
    add_limits(parser.add_argument_group(FURTHER + "limits"))
    local = parser.add_argument_group("local server")
    local.add_argument("--run", dest="start", action="store_true", help="start tritonserver and serve until Ctrl-C")
    local.add_argument("--host", help=f"address to listen on (default {HOST})")
    for name, port in PORTS.items():
        local.add_argument(f"--{name}-port", type=int, help=f"(default {port})")
    add_decoding(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    given = {name: getattr(args, f"{name}_port") for name in PORTS}
    if not args.start and (args.host, *given.values()) != (None,) * (1 + len(PORTS)):
        raise ConfigError("--host and the ports are of a local server: add --run, or leave them out")
    config, bundle = speculative(args), bundle_for(args)
    settings = ModelSettings(
        bundle=str(bundle),
        speculative=config,
        threads=args.threads,
        draft_threads=args.draft_threads,
        provider="cuda" if args.gpus else args.provider,
        max_running=args.max_running,
        max_waiting=args.max_waiting,
        kv_cache_bytes=args.kv_cache_bytes or 0,
        prefix_cache_slots=args.prefix_cache_slots,
        max_pause_ms=args.max_pause_ms,
        private_weights=args.private_weights,
    )
    placement = Placement(args.instances, args.gpus)
    if args.start:
        Distribution.find()  # raises before anything is written
    folder = write_model(bundle, args.output, args.name, settings, placement, args.copy_bundle)
    console = Console()
    written = f"Model written to {folder}; its README.md says how to start it."
    say(console, written)
    if not args.start:
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopping a container sends SIGTERM
    ports = Ports(**{name: PORTS[name] if port is None else port for name, port in given.items()})
    with TritonServer(args.output, ports, HOST if args.host is None else args.host, [args.name]) as server:
        say(console, f"Ready: HTTP on {server.http}, gRPC on {server.grpc}, {server.metrics}; log in {server.log}")
        code = server.wait()
        raise EngineError(
            f"tritonserver ended by itself with exit code {code}; see its last words:\n{server.last_words()}"
        )
