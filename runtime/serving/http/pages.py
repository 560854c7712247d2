"""The server's web pages: a page to talk to the model, and the reference of the API.

A page is one file: its only script and style are inline, and it loads nothing else. A Content-Security-Policy allows
this script and style by their hashes and forbids all others, so that no text on the page can become code.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from ...inspection.explain_style import STYLE
from ...sampling.params import SamplingParams
from .reference import reference

CHAT, REFERENCE = "/", "/docs"
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
SAFETY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def add_pages(app: FastAPI, defaults: SamplingParams) -> None:
    """Add both pages. They contain nothing of the bundle but its sampling settings, so they need no API key."""

    talk = chat_page(defaults)

    @app.get(CHAT, include_in_schema=False)
    async def chat() -> Response:
        return talk

    @cache
    def described() -> Response:
        return page(reference(app.openapi()))

    @app.get(REFERENCE, include_in_schema=False)
    async def fields() -> Response:
        return described()


def chat_page(defaults: SamplingParams) -> Response:
    """The chat page, with the settings that its fields begin with. An explanation that the page opens inherits its
    policy, which therefore allows that style, too."""
    text = files(__package__).joinpath("chat.html").read_text(encoding="utf-8")
    for name in ("temperature", "top_p", "max_tokens"):
        text = text.replace(f'"{name.upper()}"', f'"{getattr(defaults, name)}"')
    return page(text, (STYLE,))


def page(html: str, other_styles: Sequence[str] = ()) -> Response:
    """A page with the policy that allows its own inline script and style, and `other_styles`."""
    allowed: dict[str, list[str]] = {"script": [], "style": [digest(style) for style in other_styles]}
    for kind, content in INLINE.findall(html):
        allowed[kind].append(digest(content))
    policy = (
        "default-src 'none'",
        *(f"{kind}-src {' '.join(hashes) or repr('none')}" for kind, hashes in allowed.items()),
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return HTMLResponse(html, headers={"content-security-policy": "; ".join(policy), **SAFETY})


def digest(content: str) -> str:
    """The source expression of an inline script or style. Browsers hash it after newlines became line feeds."""
    return f"'sha256-{base64.b64encode(sha256(content.encode()).digest()).decode()}'"
