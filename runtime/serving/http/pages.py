"""The server's web pages: a page to talk to the model, and the reference of the API.

The pages load nothing from other servers. A Content-Security-Policy allows the scripts and styles of this package and
forbids all others, so that no text on a page can become code.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException

from ...inspection.explain_style import STYLE
from ...sampling.params import SamplingParams
from .reference import reference

CHAT, REFERENCE = "/", "/docs"
# What the chat page loads from FOLDER, and under the address of the same name.
FOLDER = "page"
STYLES = ("icons.css", "page.css", "text.css")
MODULES = ("controls", "dom", "growing", "markdown", "page", "rounds", "server", "storage", "theme", "tint", "turns")
LIBRARIES = ("libraries/highlight.min.js", "libraries/marked.esm.js", "libraries/purify.min.js")
SCRIPTS = (*(f"{module}.js" for module in MODULES), *LIBRARIES)
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
SAFETY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def add_pages(app: FastAPI, defaults: SamplingParams) -> None:
    """Add both pages. They contain nothing of the bundle but its sampling settings, so they need no API key."""

    talk, parts = chat_page(defaults), page_files()

    @app.get(CHAT, include_in_schema=False)
    async def chat() -> Response:
        return talk

    @app.get(f"/{FOLDER}/{{name:path}}", include_in_schema=False)
    async def part(name: str, request: Request) -> Response:
        if (found := parts.get(name)) is None:
            raise HTTPException(404, "Not Found")
        known = request.headers.get("if-none-match") == found.headers["etag"]
        return Response(status_code=304, headers={"etag": found.headers["etag"], **SAFETY}) if known else found

    @cache
    def described() -> Response:
        return page(reference(app.openapi()))

    @app.get(REFERENCE, include_in_schema=False)
    async def fields() -> Response:
        return described()


def chat_page(defaults: SamplingParams) -> Response:
    """The chat page, with the settings that its fields begin with. An explanation that the page opens inherits its
    policy, which therefore allows that style, too. Only DOMPurify may turn a string into elements."""
    text = content("page.html").decode()
    for name in ("temperature", "top_p", "max_tokens"):
        text = text.replace(f'"{name.upper()}"', f'"{getattr(defaults, name)}"')
    own = dict.fromkeys(("script-src", "connect-src"), "'self'")
    own |= {"style-src": f"'self' {digest(STYLE)}", "frame-src": "blob:"}
    return page(text, own | {"require-trusted-types-for": "'script'", "trusted-types": "dompurify"})


def page_files() -> dict[str, Response]:
    """What the chat page loads, by name. Browsers ask each time whether they still have the newest."""
    kinds = dict.fromkeys(STYLES, "text/css") | dict.fromkeys(SCRIPTS, "text/javascript")
    found = {name: content(name) for name in kinds}
    tags = {name: f'"{sha256(data).hexdigest()[:32]}"' for name, data in found.items()}
    return {
        name: Response(found[name], headers={"etag": tags[name], **SAFETY}, media_type=kind)
        for name, kind in kinds.items()
    }


def content(name: str) -> bytes:
    return files(__package__).joinpath(FOLDER, *name.split("/")).read_bytes()


def page(html: str, allowed: Mapping[str, str] | None = None) -> Response:
    """A page with the policy that allows its own inline script and style, and `allowed`."""
    inline: dict[str, list[str]] = {"script-src": [], "style-src": []}
    for kind, text in INLINE.findall(html):
        inline[f"{kind}-src"].append(digest(text))
    policy = {
        "default-src": "'none'",
        **{kind: " ".join(hashes) or "'none'" for kind, hashes in inline.items()},
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        **(allowed or {}),
    }
    value = "; ".join(f"{kind} {sources}" for kind, sources in policy.items())
    return HTMLResponse(html, headers={"content-security-policy": value, **SAFETY})


def digest(text: str) -> str:
    """The source expression of an inline script or style. Browsers hash it after newlines became line feeds."""
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"
