"""Pages for people: `/` links to everything that an ingress serves, and `/docs` describes the API.

The pages need no internet, because the package fastapi-swagger contains the files of Swagger UI. Links are relative, so
the pages also work behind a proxy that serves them below a path.
"""

import hashlib
from base64 import b64encode
from collections.abc import Mapping
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response

from forebay.ingress.errors import ApiError
from forebay.ingress.http.openapi import errors

HTML = "text/html"
# Name in the JSON form of `/`, address, and the text of the link.
LINKS = (
    ("docs", "docs", "API documentation"),
    ("openapi", "openapi.json", "OpenAPI document"),
    ("models", "v1/models", "Models"),
    ("status", "v1/status", "Status: owner, workers and requests"),
    ("health", "health", "Health"),
    ("metrics", "metrics", "Prometheus metrics"),
)
STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.6 system-ui,sans-serif;max-width:40rem;margin:3rem auto;padding:0 1rem}"
    "h1{margin-bottom:0}ul{padding-left:1.2rem}"
)
ROOT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>forebay</title>
<link rel="icon" href="data:,"><style>{style}</style></head>
<body><main><h1>forebay</h1>
<p>Version {version}, serving <strong>{model}</strong> with an OpenAI-compatible API.</p>
<ul>
{links}
</ul></main></body></html>
"""
DOCS = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>forebay API</title><link rel="icon" href="data:,"><link rel="stylesheet" href="docs/swagger-ui.css"></head>
<body><div id="swagger-ui"></div><script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script></body></html>
"""
# A file of its own, because the policy below forbids inline scripts. With `servers`, the page sends requests to
# addresses relative to its own.
START = """fetch("openapi.json").then((response) => response.json()).then((spec) => SwaggerUIBundle({
  spec: { ...spec, servers: [{ url: new URL(".", location.href).pathname }] },
  dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null,
}));
"""
ASSETS = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}
BASE_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src 'self' data:"


def add_pages(app: FastAPI, model_name: str) -> None:
    about = {"name": "forebay", "version": version("forebay"), "model": model_name}
    root = _root(about)
    root_headers = _headers(f"style-src 'sha256-{_sha256(STYLE)}'") | {"vary": "accept"}
    # Swagger UI sets styles of its elements, and its style sheet contains images as data.
    docs_headers = _headers("script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'")

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        """Return the page that links to the other pages, or the links as JSON to clients that do not accept HTML."""
        if HTML in request.headers.get("accept", ""):
            return HTMLResponse(root, headers=root_headers)
        links = {name: address for name, address, _ in LINKS}
        return JSONResponse({**about, "links": links}, headers={"vary": "accept"})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Return the page that describes the API."""
        return HTMLResponse(DOCS, headers=docs_headers)

    @app.get("/docs/{name}", include_in_schema=False, responses=errors(404))
    async def docs_file(name: str) -> Response:
        """Return a script or style sheet of `/docs`."""
        if name == "start.js":
            return Response(START, headers=docs_headers, media_type="text/javascript")
        if name not in ASSETS:
            raise ApiError(404, "not_found", f"unknown path /docs/{name}")
        path = Path(str(files("fastapi_swagger.resources") / name))
        return FileResponse(path, headers=docs_headers, media_type=ASSETS[name])


def _root(about: Mapping[str, str]) -> str:
    links = "\n".join(f'<li><a href="{address}">{text}</a> <code>/{address}</code></li>' for _, address, text in LINKS)
    shown = {name: escape(value) for name, value in about.items()}
    return ROOT.format(style=STYLE, version=shown["version"], model=shown["model"], links=links)


def _headers(policy: str) -> dict[str, str]:
    return {
        "content-security-policy": f"{BASE_POLICY}; {policy}",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }


def _sha256(text: str) -> str:
    return b64encode(hashlib.sha256(text.encode()).digest()).decode()
