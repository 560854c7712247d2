"""A stand-in for the Hugging Face Hub on this machine: the list of a repository's files, and the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from answering import QuietHandler, answering

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandIn(ThreadingHTTPServer):
    """Repositories are folders of `root`, two levels deep; each has the revisions `main`, `v2` and COMMIT. asked: the
    files of which somebody read the content, as org/name/file."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.asked: list[str] = []
        self.listed_commit = COMMIT

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        match parts:
            case ["api", "models", org, name]:
                self.list_files(org, name, "main")
            case ["api", "models", org, name, "revision", revision]:
                self.list_files(org, name, revision)
            case [org, name, "resolve", revision, *path]:
                self.send_file(org, name, revision, "/".join(path))
            case _:
                self.refuse("EntryNotFound")

    def list_files(self, org: str, name: str, revision: str) -> None:
        folder = self.server.root / org / name
        if not folder.is_dir():
            self.refuse("RepoNotFound")
        elif revision not in ("main", "v2", COMMIT):
            self.refuse("RevisionNotFound")
        else:
            files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
            listed = [{"rfilename": file.relative_to(folder).as_posix(), "size": file.stat().st_size} for file in files]
            content = {"id": f"{org}/{name}", "modelId": f"{org}/{name}", "sha": self.server.listed_commit}
            self.reply(json.dumps(content | {"siblings": listed}).encode(), 200, [("Content-Type", "application/json")])

    def send_file(self, org: str, name: str, revision: str, path: str) -> None:
        file = self.server.root / org / name / path
        if revision not in ("main", "v2", COMMIT) or not file.is_file():
            self.refuse("EntryNotFound")
            return
        content = file.read_bytes()
        if self.command == "GET":
            self.server.asked.append(f"{org}/{name}/{path}")
        digest = hashlib.sha256(content).hexdigest()
        self.reply(content, 200, [("ETag", f'"{digest}"'), ("X-Repo-Commit", COMMIT)])

    def refuse(self, code: str) -> None:
        self.reply(b"{}", 404, [("X-Error-Code", code), ("X-Error-Message", f"the stand-in says {code}")])


@contextmanager
def stand_in(root: Path) -> Iterator[StandIn]:
    """A server that answers until the end."""
    server = StandIn(root)
    with answering(server):
        yield server
