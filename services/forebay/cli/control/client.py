"""HTTP client of `forebay control`, and the exit codes for its responses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.common.admin_token import VARIABLE, admin_token
from forebay.cli.common.connection import advice
from forebay.cli.common.errors import USAGE, complain, explained, fail

if TYPE_CHECKING:
    import httpx

URL = "http://127.0.0.1:8000"
UrlOption = Annotated[str, typer.Option(metavar="URL", help="URL of an ingress of the running system.")]
ServedOption = Annotated[
    str, typer.Option("--model", metavar="NAME", help="Model of the command, if the ingress serves several models.")
]
STATUS_S = 5.0  # an ingress on Kafka derives the status from the log; only a suggestion in an error waits for it
# Error codes for names on the command line.
INVALID = frozenset({"model_not_found", "unknown_worker", "unknown_policy", "unknown_pool"})
MODEL_HINT = "; pass --model NAME"
PATIENCE_S = 10.0  # longer than every timeout of the ingress itself


@dataclass(frozen=True, slots=True)
class IngressClient:
    """Client of an ingress.

    Attributes:
        headers: headers of each request, with the token of the admin API or an API key.
        model: model of each request; empty for the only model of the ingress.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)
    model: str = ""

    @property
    def query(self) -> dict[str, str]:
        return {"model": self.model} if self.model else {}

    def request(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 0.0) -> "httpx.Response":
        """Send a POST request with `body`, or a GET request if it is None. Exit if the ingress does not respond."""
        import httpx  # noqa: PLC0415 - takes 200 ms, which --help does not wait for

        method = "GET" if body is None else "POST"
        address = f"{self.url.rstrip('/')}{path}"
        try:
            return httpx.request(
                method, address, params=self.query, json=body, headers=self.headers, timeout=timeout_s + PATIENCE_S
            )
        except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            fail(f"{self.url} does not respond ({error!r}); {advice(error)}")

    def known_names(self) -> dict[str, list[str]]:
        """Return the names of workers and pools, by `worker` and `pool`. Empty if the ingress does not report them."""
        import httpx  # noqa: PLC0415 - as above

        try:
            address = f"{self.url.rstrip('/')}/v1/status"
            response = httpx.get(address, params=self.query, headers=self.headers, timeout=STATUS_S)
        except httpx.TransportError:
            return {}
        if response.status_code != HTTPStatus.OK:  # for example, because it requires an API key
            return {}
        status = response.json()
        return {
            "worker": [worker["worker_id"] for worker in status["workers"]],
            "pool": [pool["pool"] for pool in status["pools"]],
        }


def client_for(url: str, token_file: Path | None, model: str) -> IngressClient:
    """Return a client for a model of the ingress at `url`, with the admin token from a file or the environment."""
    with explained():
        token = admin_token(token_file)
    return IngressClient(url, {"authorization": f"Bearer {token}"} if token else {}, model)


def decode_response(url: str, response: "httpx.Response", key: str) -> dict[str, Any]:
    """Return the decoded body of a response. Exit if it has neither `key` nor an error, so is not from an ingress."""
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not (key in answer or "error" in answer):
        fail(f"{url} is not an ingress (unexpected response, HTTP {response.status_code}); check --url")
    return answer


def exit_unless_ok(answer: Mapping[str, Any], response: "httpx.Response") -> None:
    """Exit if the response is an error: with 2 if an option or the token is invalid, otherwise with 1."""
    if response.status_code == HTTPStatus.OK:
        return
    code = str(answer["error"].get("code"))
    is_invalid = response.status_code == HTTPStatus.BAD_REQUEST or code in INVALID
    if response.status_code == HTTPStatus.NOT_FOUND and code == "not_found":
        complain("the admin API is disabled; start the ingress with --admin-api and a token")
    elif code.startswith("admin_token"):
        complain(f"{answer['error']['message']}; set {VARIABLE} or --admin-token-file")
        is_invalid = True
    else:
        hint = MODEL_HINT if code == "model_required" else ""
        complain(f"{answer['error']['message']}{hint}")
    raise typer.Exit(USAGE if is_invalid else 1)
