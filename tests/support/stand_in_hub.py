"""A stand-in for the Hugging Face Hub on this machine: the list of a repository's files, and the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

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


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, format: str, *args: object) -> None:
        pass

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
            content = {
                "id": f"{org}/{name}",
                "modelId": f"{org}/{name}",
                "sha": self.server.listed_commit,
                "siblings": listed,
            }
            self.send(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send_file(self, org: str, name: str, revision: str, path: str) -> None:
        file = self.server.root / org / name / path
        if revision not in ("main", "v2", COMMIT) or not file.is_file():
            self.refuse("EntryNotFound")
            return
        content = file.read_bytes()
        if self.command == "GET":
            self.server.asked.append(f"{org}/{name}/{path}")
        self.send(content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def refuse(self, code: str) -> None:
        self.send(b"{}", {"X-Error-Code": code, "X-Error-Message": f"the stand-in says {code}"}, 404)

    def send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def stand_in(root: Path) -> Iterator[StandIn]:
    """A server that answers until the end."""
    server = StandIn(root)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
