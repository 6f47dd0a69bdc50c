"""GET /docs: the OpenAPI document as one page without scripts, which needs no other host.

FastAPI's own page loads Swagger from a CDN, which a cluster without internet cannot reach.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Response

STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:1rem auto;padding:0 1rem}"
    "code{font-size:.95em;overflow-wrap:anywhere}section{border-top:1px solid #8888;padding:.3rem 0}"
    "h3{font-size:1rem;margin:.4rem 0}b{display:inline-block;min-width:4rem}table{border-collapse:collapse}"
    "td,th{text-align:left;vertical-align:top;padding:.1rem 1rem .1rem 0}"
)
STYLE_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
STYLE_SOURCE = f"'sha256-{STYLE_DIGEST}'"
POLICY = f"default-src 'none'; style-src {STYLE_SOURCE}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
METHODS = ("get", "post", "put", "patch", "delete")


def install_docs_page(app: FastAPI) -> None:
    """Serve `render(app.openapi())` at /docs."""
    rendered: list[str] = []

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        if not rendered:  # once: the document never changes
            rendered.append(render(app.openapi()))
        headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
        return Response(rendered[0], media_type="text/html", headers=headers)


def render(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    info = document["info"]
    title = html.escape(f"{info['title']} {info['version']}: REST")
    operations = [
        _operation(path, method, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method in METHODS
    ]
    schemas = [_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n'
        '<p>The same as a document: <a href="openapi.json">openapi.json</a>. Errors are problem documents (RFC 9457).'
        f"</p>\n<h2>Endpoints</h2>\n{''.join(operations)}\n<h2>Bodies</h2>\n{''.join(schemas)}</body></html>\n"
    )


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    name = html.escape(operation["operationId"])
    rows = [
        _row(f"{parameter['name']} ({parameter['in']})", parameter["schema"], required=parameter.get("required", False))
        for parameter in operation.get("parameters", ())
    ]
    if "requestBody" in operation:
        rows += [_row("body", media["schema"], required=True) for media in _contents(operation["requestBody"])]
    for status, response in operation["responses"].items():
        media = next(_contents(response), None)
        rows.append(_row(status, (media or {}).get("schema", {}), required=True, more=response["description"]))
    return (
        f'<section id="{name}"><h3><b>{method.upper()}</b> <code>{html.escape(path)}</code></h3>'
        f"<p>{html.escape(operation.get('description', ''))}</p><table>{''.join(rows)}</table></section>\n"
    )


def _contents(holder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from holder.get("content", {}).values()


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [_row(field, value, required=field in required) for field, value in schema.get("properties", {}).items()]
    return (
        f'<section id="schema-{html.escape(name)}"><h3>{html.escape(name)}</h3>'
        f"<p>{html.escape(schema.get('description', ''))}</p><table>{''.join(rows)}</table></section>\n"
    )


def _row(name: str, schema: Mapping[str, Any], *, required: bool, more: str = "") -> str:
    mark = "" if required else ", optional"
    about = more or schema.get("description", "")
    return (
        f"<tr><td><code>{html.escape(name)}</code></td><td>{_type(schema)}{mark}</td><td>{html.escape(about)}</td></tr>"
    )


def _type(schema: Mapping[str, Any]) -> str:
    """Return the type of a schema as HTML, with links to the bodies that it names."""
    if "$ref" in schema:
        name = html.escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(map(_type, choices))
    if "enum" in schema:
        return " or ".join(html.escape(str(value)) for value in schema["enum"])
    if "const" in schema:
        return html.escape(str(schema["const"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if isinstance(more := schema.get("additionalProperties"), Mapping):
        return f"map of {_type(more)}"
    return html.escape(str(schema.get("type", "any")))
