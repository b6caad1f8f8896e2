"""HTTP client of `forebay control`, and the exit codes for its responses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from forebay.cli.common.credentials import TOKEN_VARIABLE, admin_token
from forebay.cli.common.errors import USAGE, explained, fail
from forebay.cli.common.failures import advice
from forebay.cli.common.options import Option
from forebay.events.names import unknown_name
from forebay.ingress.errors import model_required
from forebay.processes.notices import complain

if TYPE_CHECKING:
    import httpx

URL = "http://127.0.0.1:8000"
UrlOption = Annotated[str, Option(metavar="URL", help="URL of an ingress of the running system.")]
ServedOption = Annotated[
    str, Option("--model", metavar="NAME", help="Model of the command, if the ingress serves several models.")
]
STATUS_S = 5.0  # an ingress on Kafka derives the status from the log; only a suggestion in an error waits for it
# Error codes for names on the command line.
INVALID = frozenset({"model_not_found", "unknown_worker", "unknown_policy", "unknown_pool"})
ADMIN_TOKEN_ERRORS = ("admin_token_missing", "admin_token_wrong")
TOKEN_HINT = f"; set {TOKEN_VARIABLE} or --token-file"
MODEL_HINT = "; pass --model NAME"
PATIENCE_S = 10.0  # longer than every timeout of the ingress itself


@dataclass(frozen=True, slots=True)
class IngressClient:
    """Client of an ingress.

    `headers` has the token of the admin API or an API key. `model` is empty for the only model of the ingress.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)
    model: str = ""

    @classmethod
    def of(cls, url: str, token_file: Path | None, model: str) -> "IngressClient":
        """Return a client for a model of an ingress, with the admin token from a file or the environment."""
        with explained():
            token = admin_token(token_file)
        return cls(url, {"authorization": f"Bearer {token}"} if token else {}, model)

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

    def decode(self, response: "httpx.Response", key: str) -> dict[str, Any]:
        """Return the body of a response. Exit if it has neither `key` nor an error, so is not from an ingress."""
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not (key in answer or "error" in answer):
            fail(f"{self.url} is not an ingress (unexpected response, HTTP {response.status_code}); check --url")
        return answer

    def exit_unless_ok(self, answer: Mapping[str, Any], response: "httpx.Response") -> None:
        """Exit if the response is an error: with 2 if an option or the token is invalid, otherwise with 1."""
        if response.status_code == HTTPStatus.OK:
            return
        code = str(answer["error"].get("code"))
        is_invalid = response.status_code == HTTPStatus.BAD_REQUEST or code in INVALID
        if response.status_code == HTTPStatus.NOT_FOUND and code == "not_found":
            complain(f"{self.url} has no admin API; start the ingress with --admin-api, or use its --admin-port")
        elif code in ADMIN_TOKEN_ERRORS:
            complain(f"{answer['error']['message']}{TOKEN_HINT}")
            is_invalid = True
        else:
            hint = MODEL_HINT if code == "model_required" else ""
            complain(f"{answer['error']['message']}{hint}")
        raise click.exceptions.Exit(USAGE if is_invalid else 1)

    def call(self, path: str, key: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the body of the response to a request. Exit if the response is an error, or has no `key`."""
        response = self.request(path, body)
        answer = self.decode(response, key)
        self.exit_unless_ok(answer, response)
        return answer

    def served_model(self) -> str:
        """Return the name of the model to change: that of the client, or the only one that the ingress serves."""
        if self.model:
            return self.model
        cards = self.call("/v1/models", "data")["data"]
        try:  # adapters have a `parent`, and aliases a `root`
            names = [str(card["id"]) for card in cards if not {"parent", "root"} & card.keys()]
        except (LookupError, TypeError, AttributeError):
            names = []
        if not names:
            fail(f"{self.url} serves no model yet; wait until a worker has joined, or check --url")
        if len(names) > 1:
            fail(f"{model_required(names)}{MODEL_HINT}")
        return names[0]

    def suggest_names(self, answer: Mapping[str, Any], given: Mapping[str, list[str]]) -> None:
        """Replace the error for an unknown worker or pool by one that suggests similar names to those in `given`."""
        kind = str(answer.get("error", {}).get("code")).removeprefix("unknown_")
        known = self._known_names().get(kind) if kind in given else None
        unknown = [name for name in given.get(kind, ()) if known and name not in known]
        if known and unknown:
            answer["error"]["message"] = unknown_name(kind, unknown[0], known)

    def _known_names(self) -> dict[str, list[str]]:
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
