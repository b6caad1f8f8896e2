"""`forebay control disaggregation` and `busy_threshold`: by what a running system decides, shown or changed.

Values are sent as they are typed: the ingress, which says what is wrong with them, is the one place that knows.
"""

import json as jsonlib
from typing import Annotated, Any, get_args

import typer
from rich.table import Table

from forebay.cli.common.admin_token import AdminTokenFileOption
from forebay.cli.common.errors import fail
from forebay.cli.common.terminal import in_markup, results
from forebay.cli.control.client import URL, IngressClient, UrlOption, answer_of, end_unless_ok, service_at
from forebay.events.control import DisaggPolicy

NONE = "none"  # of a threshold: it is never reached
JsonOption = Annotated[bool, typer.Option("--json", help="Before and now as one JSON object on stdout.")]


def disaggregation(
    policy: Annotated[str | None, typer.Option(help=f"One of {', '.join(get_args(DisaggPolicy))}.")] = None,
    max_local_prefill_length: Annotated[str | None, typer.Option(help="In tokens; of classic.")] = None,
    max_prefill_queue_size: Annotated[str | None, typer.Option(help="Requests that wait; of classic.")] = None,
    eff_isl_threshold: Annotated[str | None, typer.Option(help="In tokens; of isl_bounding.")] = None,
    eff_isl_ratio_threshold: Annotated[str | None, typer.Option(help="Share of a prompt; of isl_bounding.")] = None,
    prefill_busy_threshold: Annotated[str | None, typer.Option(help="Engine steps, or none; of prefill_load.")] = None,
    decode_busy_threshold: Annotated[str | None, typer.Option(help="Share of a worker's KV blocks, or none.")] = None,
    enforce: Annotated[
        bool | None, typer.Option("--enforce/--no-enforce", help="Refuse what cannot be computed remotely.")
    ] = None,
    url: UrlOption = URL,
    admin_token_file: AdminTokenFileOption = None,
    json: JsonOption = False,
) -> None:
    """Show or change who computes prompts."""
    changes = {
        "policy": policy,
        "max_local_prefill_length": max_local_prefill_length,
        "max_prefill_queue_size": max_prefill_queue_size,
        "eff_isl_threshold": eff_isl_threshold,
        "eff_isl_ratio_threshold": eff_isl_ratio_threshold,
        "prefill_busy_threshold": prefill_busy_threshold,
        "decode_busy_threshold": decode_busy_threshold,
        "enforce": enforce,
    }
    _change(service_at(url, admin_token_file), "/disaggregation", changes, json=json)


def busy_threshold(
    active_decode_blocks_threshold: Annotated[
        str | None, typer.Option(help="Share of a rank's KV blocks, or none.")
    ] = None,
    active_prefill_tokens_threshold: Annotated[str | None, typer.Option(help="In tokens, or none.")] = None,
    active_prefill_tokens_threshold_frac: Annotated[
        str | None, typer.Option(help="In multiples of max_num_batched_tokens, or none.")
    ] = None,
    url: UrlOption = URL,
    admin_token_file: AdminTokenFileOption = None,
    json: JsonOption = False,
) -> None:
    """Show or change when workers are busy."""
    changes = {
        "active_decode_blocks_threshold": active_decode_blocks_threshold,
        "active_prefill_tokens_threshold": active_prefill_tokens_threshold,
        "active_prefill_tokens_threshold_frac": active_prefill_tokens_threshold_frac,
    }
    _change(service_at(url, admin_token_file), "/busy_threshold", changes, json=json)


def _change(service: IngressClient, path: str, changes: dict[str, Any], *, json: bool) -> None:
    given = {name: _value(value) for name, value in changes.items() if value is not None}
    model = _model(service)
    before = _settings(service, path, {"model": model})
    now = _settings(service, path, {"model": model, **given}) if given else before
    if json:
        typer.echo(jsonlib.dumps({"before": before, "now": now}))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("setting", "before", "now") if given else ("setting", "now"):
        table.add_column(name, overflow="fold")
    for name in (name for name in changes if name in now):
        cells = [before[name], now[name]] if given else [now[name]]
        table.add_row(in_markup(name), *(in_markup(_text(one)) for one in cells))
    console = results(wide=True)
    pool = f", pool {now['pool']}" if "pool" in now else ""
    console.print(in_markup(f"model {model}{pool}"))
    console.print(table)


def _model(service: IngressClient) -> str:
    """What the ingress serves."""
    response = service.ask("/v1/models")
    answer = answer_of(service.url, response, "data")
    end_unless_ok(answer, response)
    try:
        return str(answer["data"][0]["id"])
    except (LookupError, TypeError):
        fail(f"{service.url} serves no model")


def _settings(service: IngressClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = service.ask(path, body)
    answer = answer_of(service.url, response, "model")
    end_unless_ok(answer, response)
    return answer


def _value(given: str | bool) -> Any:
    """A number, or nothing, or text."""
    if isinstance(given, bool) or given == NONE:
        return None if given == NONE else given
    try:
        return jsonlib.loads(given)
    except ValueError:
        return given


def _text(value: Any) -> str:
    return NONE if value is None else value if isinstance(value, str) else jsonlib.dumps(value)
