"""`forebay control disaggregation` and `busy-threshold`: show or change routing settings of a running system.

Values are sent without validation. The ingress validates them and reports errors.
"""

import json as jsonlib
from typing import Annotated, Any, get_args

import typer

from forebay.cli.common.admin_token import AdminTokenFileOption
from forebay.cli.common.errors import fail
from forebay.cli.common.operator_name import OperatorOption, operator_name
from forebay.cli.common.terminal import in_markup, results
from forebay.cli.control.client import (
    MODEL_HINT,
    URL,
    IngressClient,
    ServedOption,
    UrlOption,
    client_for,
    decode_response,
    exit_unless_ok,
)
from forebay.events.control import DisaggPolicy
from forebay.ingress.errors import model_required

NONE = "none"  # value of an option that disables a threshold
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the previous and the current settings as one JSON object.")
]


def disaggregation(
    disagg_policy: Annotated[
        str | None, typer.Option(help=f"Policy that decides: {', '.join(get_args(DisaggPolicy))}.")
    ] = None,
    max_local_prefill_length: Annotated[
        str | None, typer.Option(help="Maximum tokens of a local prefill; for classic.")
    ] = None,
    max_prefill_queue_size: Annotated[
        str | None, typer.Option(help="Maximum requests waiting for prefill; for classic.")
    ] = None,
    eff_isl_threshold: Annotated[
        str | None, typer.Option(help="Tokens from which prefill is remote; for isl_bounding.")
    ] = None,
    eff_isl_ratio_threshold: Annotated[
        str | None, typer.Option(help="Uncached fraction of a prompt from which prefill is remote; for isl_bounding.")
    ] = None,
    prefill_busy_threshold: Annotated[
        str | None,
        typer.Option(
            help="Engine steps of prompt tokens above which prefill workers are busy, or none; for prefill_load."
        ),
    ] = None,
    decode_busy_threshold: Annotated[
        str | None, typer.Option(help="Fraction of a decode worker's KV blocks above which prefill is remote, or none.")
    ] = None,
    enforce_disagg: Annotated[
        bool | None,
        typer.Option(
            "--enforce-disagg/--no-enforce-disagg", help="Reject a request if no prefill worker can compute its prompt."
        ),
    ] = None,
    operator: OperatorOption = "",
    url: UrlOption = URL,
    model: ServedOption = "",
    admin_token_file: AdminTokenFileOption = None,
    json: JsonOption = False,
) -> None:
    """Show or change which prompts prefill workers compute."""
    changes = {
        "policy": disagg_policy,
        "max_local_prefill_length": max_local_prefill_length,
        "max_prefill_queue_size": max_prefill_queue_size,
        "eff_isl_threshold": eff_isl_threshold,
        "eff_isl_ratio_threshold": eff_isl_ratio_threshold,
        "prefill_busy_threshold": prefill_busy_threshold,
        "decode_busy_threshold": decode_busy_threshold,
        "enforce": enforce_disagg,
    }
    _change(client_for(url, admin_token_file, model), "/disaggregation", changes, operator, json=json)


def busy_threshold(
    active_decode_blocks_threshold: Annotated[
        str | None, typer.Option(help="Fraction of a rank's KV blocks in use above which the rank is busy, or none.")
    ] = None,
    active_prefill_tokens_threshold: Annotated[
        str | None, typer.Option(help="Queued prefill tokens above which a rank is busy, or none.")
    ] = None,
    active_prefill_tokens_threshold_frac: Annotated[
        str | None,
        typer.Option(help="Queued engine steps of prefill above which a rank is busy, or none."),
    ] = None,
    operator: OperatorOption = "",
    url: UrlOption = URL,
    model: ServedOption = "",
    admin_token_file: AdminTokenFileOption = None,
    json: JsonOption = False,
) -> None:
    """Show or change the busy thresholds of workers."""
    changes = {
        "active_decode_blocks_threshold": active_decode_blocks_threshold,
        "active_prefill_tokens_threshold": active_prefill_tokens_threshold,
        "active_prefill_tokens_threshold_frac": active_prefill_tokens_threshold_frac,
    }
    _change(client_for(url, admin_token_file, model), "/busy_threshold", changes, operator, json=json)


def _change(service: IngressClient, path: str, changes: dict[str, Any], operator: str, *, json: bool) -> None:
    changed = {name: _value(value) for name, value in changes.items() if value is not None}
    model = served_model(service)
    before = _settings(service, path, {"model": model})
    body = {"model": model, "operator": operator_name(operator), **changed}
    now = _settings(service, path, body) if changed else before
    if json:
        typer.echo(jsonlib.dumps({"before": before, "now": now}))
        return
    from rich.table import Table  # noqa: PLC0415 - --help does not wait for it

    table = Table(box=None, pad_edge=False)
    for name in ("setting", "before", "now") if changed else ("setting", "now"):
        table.add_column(name)
    for name in (name for name in changes if name in now):
        cells = [before[name], now[name]] if changed else [now[name]]
        table.add_row(in_markup(name), *(in_markup(_text(one)) for one in cells))
    console = results()
    pool = f", pool {now['pool']}" if "pool" in now else ""
    console.print(in_markup(f"model {model}{pool}"))
    console.print(table)


def served_model(service: IngressClient) -> str:
    """Return the name of the model to change: the one of the client, or the only one that the ingress serves."""
    if service.model:
        return service.model
    response = service.request("/v1/models")
    result = decode_response(service.url, response, "data")
    exit_unless_ok(result, response)
    try:  # adapters have a `parent`, and aliases a `root`
        names = [str(card["id"]) for card in result["data"] if not {"parent", "root"} & card.keys()]
    except (LookupError, TypeError, AttributeError):
        names = []
    if not names:
        fail(f"{service.url} serves no model yet; wait until a worker has joined, or check --url")
    if len(names) > 1:
        fail(f"{model_required(names)}{MODEL_HINT}")
    return names[0]


def _settings(service: IngressClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = service.request(path, body)
    result = decode_response(service.url, response, "model")
    exit_unless_ok(result, response)
    return result


def _value(text: str | bool) -> Any:
    """Parse the value of an option: a boolean, `none`, a JSON value, or otherwise the text itself."""
    if isinstance(text, bool) or text == NONE:
        return None if text == NONE else text
    try:
        return jsonlib.loads(text)
    except ValueError:
        return text


def _text(value: Any) -> str:
    return NONE if value is None else value if isinstance(value, str) else jsonlib.dumps(value)
