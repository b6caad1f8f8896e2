"""`forebay control`: has workers of a running system do something, and changes by what its router decides."""

import json as jsonlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.table import Table
from typer.core import TyperGroup

from forebay.cli.common.admin_token import AdminTokenFileOption
from forebay.cli.common.errors import fail
from forebay.cli.common.terminal import in_markup, results
from forebay.cli.control.client import URL, UrlOption, answer_of, end_unless_ok, service_at
from forebay.cli.control.settings import busy_threshold, disaggregation
from forebay.events.control import Action

ACTIONS: dict[Action, str] = {
    "load_lora": "Have workers load an adapter.",
    "unload_lora": "Have workers unload an adapter.",
    "list_loras": "Say which adapters workers have.",
    "clear_kv_blocks": "Have workers empty their KV caches.",
    "sleep": "Have workers free memory until they wake up.",
    "wake_up": "Have workers that sleep go on.",
    "pause": "Have workers compute nothing until they resume.",
    "resume": "Have workers that pause go on.",
}
assert set(ACTIONS) == set(get_args(Action)), "each has its line"


class _Known(TyperGroup):
    """Says which commands there are to who asks for another."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args and args[0] not in self.commands:
            fail(f"the command {args[0]!r} is not known; known: {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Known,
    help="Command workers of a running system, or change by what it routes; exit 1 unless that was done.",
    no_args_is_help=True,
)


def _doing(action: Action) -> Callable[..., None]:
    def command(
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
        url: UrlOption = URL,
        admin_token_file: AdminTokenFileOption = None,
        json: Annotated[bool, typer.Option("--json", help="The outcomes as one JSON object on stdout.")] = False,
    ) -> None:
        asked: dict[str, Any] = {
            "action": action,
            "worker_ids": worker or [],
            "pool": pool,
            "lora_name": lora,
            "lora_path": "" if path is None else str(path.absolute()),
            "level": level,
            "timeout_s": timeout_s,
        }
        response = service_at(url, admin_token_file).ask("/v1/commands", asked, timeout_s=timeout_s)
        answer = answer_of(url, response, "outcomes")
        if json:
            typer.echo(jsonlib.dumps(answer))
        elif "outcomes" in answer:
            results(wide=True).print(_table(answer["outcomes"]))
        end_unless_ok(answer, response)

    return command


for _action, _help in ACTIONS.items():
    app.command(_action, help=_help)(_doing(_action))
app.command("disaggregation")(disaggregation)
app.command("busy_threshold")(busy_threshold)


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
