"""What `forebay control` asks of an ingress, and what its answers mean for a shell."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from forebay.cli.common.admin_token import VARIABLE, admin_token
from forebay.cli.common.errors import USAGE, complain, explained, fail

URL = "http://127.0.0.1:8000"
UrlOption = Annotated[str, typer.Option(help="An ingress of the running system.")]
PATIENCE_S = 10.0  # an ingress answers by itself, or its log does, long before


@dataclass(frozen=True, slots=True)
class IngressClient:
    """An ingress of the running system, and the token that its admin API demands; empty for none."""

    url: str
    token: str = field(repr=False)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 0.0) -> httpx.Response:
        """Return the response to a POST of this body, or to a GET; end the command if there is none."""
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        method = "GET" if body is None else "POST"
        address = f"{self.url.rstrip('/')}{path}"
        try:
            return httpx.request(method, address, json=body, headers=headers, timeout=timeout_s + PATIENCE_S)
        except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            fail(f"{self.url} does not answer ({error!r}); start a system with `forebay up`")


def service_at(url: str, token_file: Path | None) -> IngressClient:
    """Return the ingress at this URL, with the token of a file or of the environment."""
    with explained():
        return IngressClient(url, admin_token(token_file))


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
    code = str(answer["error"].get("code"))
    if response.status_code == httpx.codes.NOT_FOUND and code == "not_found":
        complain("the ingress takes no commands: start it with --admin-api and a token")
    elif code.startswith("admin_token"):
        complain(f"{answer['error']['message']}; set {VARIABLE} or --admin-token-file")
    else:
        complain(str(answer["error"]["message"]))
    raise typer.Exit(USAGE if response.status_code == httpx.codes.BAD_REQUEST else 1)
