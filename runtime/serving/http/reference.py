"""The reference of the API as a web page, written from the server's OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from math import log2
from typing import Any

Schema = Mapping[str, Any]

STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 15px/1.5 system-ui, sans-serif; }
h2 { margin: 2.2rem 0 .3rem; font: 600 1.05rem ui-monospace, monospace; }
h2 b { display: inline-block; min-width: 3.6rem; color: #1a7f4b; }
code { font: .92em ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
td, th { border-top: 1px solid #8886; padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top; }
"""
LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "maxLength": "at most {} characters",
    "maxItems": "at most {} items",
}


def reference(document: Schema) -> str:
    """The page. document: an OpenAPI document, such as FastAPI.openapi returns it."""
    return "".join(parts(document))


def parts(document: Schema) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Draftwood: the API</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    yield f"<style>{STYLE}</style></head><body><h1>The API of this server</h1>"
    yield "<p>OpenAI clients use the base URL of this server with <code>/v1</code>. The same content for programs: <a "
    yield 'href="/openapi.json">/openapi.json</a>. To talk to the model: <a href="/">/</a>.</p>'
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f'<h2><b>{escape(method.upper())}</b> <span class="path">{escape(path)}</span></h2>'
            yield paragraph(operation.get("description", ""))
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content is not None:
                yield from table(document, resolved(document, content["schema"]))
    yield "</body></html>\n"


def table(document: Schema, body: Schema) -> Iterator[str]:
    """The fields of one body."""
    yield paragraph(body.get("description", ""))
    yield "<table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>"
    for name, field in body.get("properties", {}).items():
        default = "needed" if name in body.get("required", ()) else shown(field.get("default"))
        described = escape(field.get("description", ""))
        cells = (f"<code>{escape(name)}</code>", escape(kind(document, field)), escape(default), described)
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def resolved(document: Schema, schema: Schema) -> Schema:
    """The schema that a reference means."""
    name = schema.get("$ref", "").rpartition("/")[2]
    target: Schema = document["components"]["schemas"][name] if name else schema
    return target


def kind(document: Schema, schema: Schema) -> str:
    """The type of a value and its limits in words; null is left out, because it means the default."""
    schema = resolved(document, schema)
    if "anyOf" in schema:
        return " or ".join(kind(document, each) for each in schema["anyOf"] if each.get("type") != "null")
    if "const" in schema:
        return shown(schema["const"])
    if "enum" in schema:
        return " or ".join(map(shown, schema["enum"]))
    words = str(schema.get("type", "any"))
    if words == "array":
        words = f"list of {kind(document, schema.get('items', {}))}"
    if "properties" in schema:
        words += f" of {', '.join(schema['properties'])}"
    limits = [text.format(shown(schema[name])) for name, text in LIMITS.items() if name in schema]
    return ", ".join((words, *limits))


def shown(value: Any) -> str:
    """A value as JSON writes it; large limits as powers of two; nothing for null and for objects."""
    if value is None or isinstance(value, dict):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and value > 1 << 20 and abs(value - 2 ** (power := round(log2(value)))) <= 1:
        return f"2^{power} - 1"  # FastAPI has made a float of it
    return f"{value:g}" if isinstance(value, float) else str(value)


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>" if text else ""
