"""What `forebay control` asks of an ingress, and what its answers mean for a shell."""

import json as jsonlib
from collections.abc import Mapping
from typing import Annotated, Any

import httpx
import typer

from forebay.cli.common.errors import USAGE, complain, fail

URL = "http://127.0.0.1:8000"
UrlOption = Annotated[str, typer.Option(help="An ingress of the running system.")]
PATIENCE_S = 10.0  # an ingress answers by itself, or its log does, long before


def ask(url: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 0.0) -> httpx.Response:
    """What an ingress answers to a POST of this body, or to a GET; ends the command if nobody does."""
    asked = None if body is None else jsonlib.dumps(body)
    method = "GET" if body is None else "POST"
    try:
        return httpx.request(method, f"{url.rstrip('/')}{path}", content=asked, timeout=timeout_s + PATIENCE_S)
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        fail(f"{url} does not answer ({error!r}); start a system with `forebay up`")


def answer_of(url: str, response: httpx.Response, key: str) -> dict[str, Any]:
    """The body, which has this key or an error; what no ingress says ends the command."""
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not (key in answer or "error" in answer):
        fail(f"{url} does not answer as an ingress does (HTTP {response.status_code})")
    return answer


def end_unless_ok(answer: Mapping[str, Any], response: httpx.Response) -> None:
    """End the command by what went wrong, if anything did: 2 for what was wrong in itself, else 1."""
    if response.status_code == httpx.codes.OK:
        return
    if response.status_code == httpx.codes.NOT_FOUND and answer["error"].get("code") == "not_found":
        complain("the ingress takes no commands: it was started with --no-admin-api")
    else:
        complain(str(answer["error"]["message"]))
    raise typer.Exit(USAGE if response.status_code == httpx.codes.BAD_REQUEST else 1)
