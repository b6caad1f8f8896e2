"""Lines that `forebay up` prints once it serves requests."""

from collections import Counter
from collections.abc import Mapping

from forebay.cli.common.logs import announce
from forebay.cli.processes.engines import mock_connector
from forebay.cli.processes.settings import EmbeddedModel, EmbeddedSettings
from forebay.events.control import DisaggConfig, Role
from forebay.workers.kv_transfer.api import NIXL


def announce_start(settings: EmbeddedSettings, disagg: Mapping[str, DisaggConfig]) -> None:
    """Print what the system serves.

    Args:
        disagg: settings of the disaggregation in effect, by model, which `forebay control` may have changed.
    """
    where, endpoint = settings.log or "memory (lost at exit; use --log FILE to keep it)", settings.endpoint
    for model in settings.models:
        announce(f"forebay: model {model.name}, {_fleet(model)}, {settings.router.mode} router")
        pools = sorted({place.pool for place in model.places.values() if place.role == "aggregated"})
        if len(pools) > 1 and model.routing is None:
            announce(f"forebay: without rules (--pool-routing, `forebay control pools`) {pools[0]} serves all requests")
        if _has(model, "decode"):
            announce(f"forebay: prompts are computed {_where(model, settings.router.disagg, disagg[model.name])}")
    announce(f"forebay: log in {where}")
    if settings.console is not None and len(settings.models) > 1:
        others = f"`forebay console {settings.log} --group MODEL` shows the others"
        announce(f"forebay: the console shows the model {settings.console.group}; {others}")
    announce(f"forebay: OpenAI API on {endpoint.scheme}://{endpoint.host}:{endpoint.port}/v1, stop with Ctrl-C")


def _fleet(model: EmbeddedModel) -> str:
    """Describe the workers for the start message."""
    label, count = model.engine.label, Counter(place.role for place in model.places.values())
    if not count["decode"]:
        pools = Counter(place.pool for place in model.places.values())
        places = "" if len(pools) == 1 else f" ({', '.join(f'{count} in {pool}' for pool, count in pools.items())})"
        return f"{count['aggregated']} {label} worker{'s' if count['aggregated'] > 1 else ''}{places}"
    return f"{label} workers: {count['prefill']} prefill, {count['decode']} decode"


def _has(model: EmbeddedModel, role: Role) -> bool:
    return any(place.role == role for place in model.places.values())


def _where(model: EmbeddedModel, configured: DisaggConfig, disagg: DisaggConfig) -> str:
    """Describe where prompts are computed."""
    source = "" if disagg == configured else " (set by `forebay control policy`)"
    return _prefill_place(model, disagg) + source


def _prefill_place(model: EmbeddedModel, disagg: DisaggConfig) -> str:
    engine = model.engine
    if disagg.policy == "never":
        return "by decode workers"
    if not _has(model, "prefill"):
        if not disagg.enforce:
            return "by decode workers, because there are no prefill workers"
        if disagg.policy == "always":
            return "nowhere: every request is rejected, because there are no prefill workers"
        return f"by decode workers if the policy {disagg.policy} allows it; other requests are rejected"
    which = "" if disagg.policy == "always" else f" if the policy {disagg.policy} requires it"
    last = "; requests that they cannot compute are rejected" if disagg.enforce else ""
    how = ""
    if engine.is_mock:
        how = ", KV transfer by nixl" if mock_connector() == NIXL else ", KV transfer in modelled time without NIXL"
    return f"by prefill workers{which}{how}{last}"
