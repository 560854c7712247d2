"""`draftwood serve` in a separate process, as users run it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bundling import resigned
from checkpoints import VOCAB_SIZE, write_tokenizer
from tokenizers import AddedToken, Tokenizer

USER: dict[str, Any] = {"role": "user", "content": "hello"}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"

RUNNING, WAITING = "draftwood_requests_running", "draftwood_requests_waiting"
# `draftwood serve` that does what a file says, for as long as it exists: "wait", or "wait SECONDS", makes the target's
# passes wait; "KIND PLACE" raises an exception of this kind in a place. Its log is a file, or else stderr.
FAULTY = """
import builtins, signal, sys, time
from pathlib import Path
from draftwood.cli.main import main
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.decoding import scheduler
from draftwood.runtime.requests.engine_thread import EngineThread
from draftwood.runtime.serving.http import server as http_server
from draftwood.runtime.text.tokenizer import Tokenizer

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has its processes ignore
http_server.CLOSE_SECONDS = 5
fault, log, opened = Path(sys.argv.pop(1)), sys.argv.pop(1), EngineBundle.open_engine
if log:
    sys.stderr = open(log, "w")  # tracebacks by the dozen would fill a pipe that nobody reads

class PanicException(BaseException):  # of tokenizers
    pass

def faults():
    try:
        return (fault.read_text().split() + [""])[:2]
    except FileNotFoundError:
        return "", ""

def make_faulty(owner, name, place):
    real = getattr(owner, name)

    def called(*arguments, **options):
        begun = time.monotonic()
        while (told := faults())[0] == "wait" and place == "target":
            if time.monotonic() - begun >= float(told[1] or "inf"):
                break
            time.sleep(0.01)
        if told[1] == place:
            raise {**vars(builtins), **globals()}[told[0]]("an illegal memory access")
        return real(*arguments, **options)

    setattr(owner, name, called)

for owner, name, place in (
    (Tokenizer, "encode", "encode"), (Tokenizer, "decode", "decode"), (Tokenizer, "apply_chat_template", "template"),
    (scheduler, "select_joint", "outside"), (EngineThread, "_record", "outside"),
):
    make_faulty(owner, name, place)

def open_engine(self, role, *options):
    engine = opened(self, role, *options)
    make_faulty(engine, "score", role)
    return engine

EngineBundle.open_engine = open_engine
sys.exit(main(sys.argv[1:]))
"""


class Served(NamedTuple):
    """A running server. url: ends with /v1."""

    url: str
    process: subprocess.Popen[str]

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def metric(self, name: str) -> float:
        """A number of /metrics; 0 before it is counted for the first time."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.ask("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else 0

    def ask(self, path: str, body: dict[str, Any] | None = None, seconds: float = 300) -> tuple[int, str]:
        """Status and text of the answer to a GET, or to a POST with this body."""
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, content, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    @property
    def idle(self) -> bool:
        return not self.metric(RUNNING) and not self.metric(WAITING)


def events_of(text: str) -> list[Any]:
    """The chunks of a stream."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def with_chat_template(bundle: Path, folder: Path, template: str = CHAT_TEMPLATE) -> Path:
    """A copy of a bundle, called "tiny", that can hold a conversation."""
    copy = folder / "tiny"
    shutil.copytree(bundle, copy)
    (copy / "chat_template.jinja").write_text(template)
    return resigned(copy)


INFILL = {"fim_pre_token": "<unk>", "fim_suf_token": "<s>", "fim_mid_token": "</s>"}


def with_infilling(bundle: Path, folder: Path, template: str = CHAT_TEMPLATE) -> Path:
    """The same, which also infills, with tokens that were meant for something else."""
    copy = with_chat_template(bundle, folder, template)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | INFILL))
    return resigned(copy)


# It thinks as Qwen3's does; `opened` makes it begin the thought, as DeepSeek-R1's.
THINKING_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% if tools %}in <tool_call> tags\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}<think>\n\n"
    "</think>\n\n{% elif opened is defined %}<think>\n{% endif %}{% endif %}"
)


def with_thoughts(bundle: Path, folder: Path) -> Path:
    """A copy of a bundle, called "tiny", whose last two tokens are the marks of a thought."""
    copy = with_chat_template(bundle, folder, THINKING_TEMPLATE)
    write_tokenizer(copy, VOCAB_SIZE - 2)
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>")])
    tokenizer.save(str(copy / "tokenizer.json"))
    return resigned(copy)


@contextmanager
def served(bundle: Path, *options: str, program: Sequence[str] = ("-m", "draftwood")) -> Iterator[Served]:
    """A server on a free port; it is gone afterwards, whatever happened. program: what Python runs."""
    command = [sys.executable, *program, "serve", str(bundle), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            line = process.stdout.readline()
            assert "http://" in line, process.stderr.read()
            yield Served("http://" + line.split("http://")[1].split(",")[0], process)
        finally:
            process.kill()


def faulty(fault: Path, log: Path | None = None) -> tuple[str, ...]:
    """The program that does what the file `fault` says."""
    return "-c", FAULTY, str(fault), str(log or "")


def pace(pause: Path, seconds: float | None = None) -> None:
    """Let every pass take so many seconds from now on; without a number, each one waits for the next call."""
    tell(pause, f"wait {seconds or ''}")


def tell(fault: Path, what: str) -> None:
    ready = fault.with_suffix(".new")
    ready.write_text(what)
    ready.replace(fault)


@contextmanager
def paused(pause: Path, seconds: float | None = None) -> Iterator[None]:
    """While the block runs, requests run and do not end, or are so slow."""
    pace(pause, seconds)
    try:
        yield
    finally:
        pause.unlink()


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
