"""`forebay control`: has workers of a running system do something, and says what became of it at each."""

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any, get_args

import httpx
import typer
from rich.table import Table

from forebay.cli.errors import complain, fail
from forebay.cli.terminal import in_markup, results
from forebay.events.control import Action

URL = "http://127.0.0.1:8000"
ACTIONS = get_args(Action)
PATIENCE_S = 10.0  # beyond the command's own time: the ingress answers before


def control(
    action: Annotated[str, typer.Argument(help=f"One of {', '.join(ACTIONS)}.")],
    worker: Annotated[
        list[str] | None, typer.Option(help="Only this worker; repeatable. All of the model when left out.")
    ] = None,
    pool: Annotated[str, typer.Option(help="Only workers of this pool.")] = "",
    lora: Annotated[str, typer.Option(help="The adapter to load or unload.")] = "",
    path: Annotated[Path | None, typer.Option(help="Its directory, as workers see it.")] = None,
    level: Annotated[
        int, typer.Option(min=1, max=2, help="How deep to sleep: 1 keeps the weights in host memory, 2 drops them.")
    ] = 1,
    timeout_s: Annotated[float, typer.Option(min=0.001, max=3_600, help="How long workers have.")] = 60.0,
    url: Annotated[str, typer.Option(help="An ingress of the running system.")] = URL,
    json: Annotated[bool, typer.Option("--json", help="The outcomes as one JSON object on stdout.")] = False,
) -> None:
    """Command workers; exit 1 unless every one did it."""
    if action not in ACTIONS:
        fail(f"the command {action!r} is not known; known: {', '.join(ACTIONS)}")
    asked: dict[str, Any] = {
        "action": action,
        "worker_ids": worker or [],
        "pool": pool,
        "lora_name": lora,
        "lora_path": "" if path is None else str(path.absolute()),
        "level": level,
        "timeout_s": timeout_s,
    }
    try:
        response = httpx.post(f"{url.rstrip('/')}/v1/commands", json=asked, timeout=timeout_s + PATIENCE_S)
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        fail(f"{url} does not answer ({error!r}); start a system with `forebay up`")
    answer = _answer(url, response)
    if json:
        typer.echo(jsonlib.dumps(answer))
    elif "outcomes" in answer:
        results(wide=True).print(_table(answer["outcomes"]))
    if response.status_code != httpx.codes.OK:
        complain(_message(answer, response))
        raise typer.Exit(2 if response.status_code == httpx.codes.BAD_REQUEST else 1)


def _answer(url: str, response: httpx.Response) -> dict[str, Any]:
    """The body of an ingress's answer; others end the command."""
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not ("outcomes" in answer or "error" in answer):
        fail(f"{url} does not answer as an ingress does (HTTP {response.status_code})")
    return answer


def _message(answer: dict[str, Any], response: httpx.Response) -> str:
    if response.status_code == httpx.codes.NOT_FOUND and answer["error"].get("code") == "not_found":
        return "the ingress takes no commands: it was started with --no-admin-api"
    return str(answer["error"]["message"])


def _table(outcomes: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "pool", "outcome", "adapters", ""):
        table.add_column(name, overflow="fold")
    for outcome in outcomes:
        texts = (
            outcome["worker_id"],
            outcome["pool"],
            outcome["status"].replace("_", " "),
            ", ".join(outcome["loras"]),
            outcome["message"] or "",
        )
        table.add_row(*map(in_markup, texts))
    return table
