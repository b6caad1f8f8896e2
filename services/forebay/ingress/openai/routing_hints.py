"""Routing hints of a request from `nvext` and headers. A header overrides the body, as in Dynamo.

Unlike Dynamo, forebay rejects invalid headers and contradictory hints. Routing hints are for trusted clients, because a
client that pins workers or raises its priority takes capacity from others. So an ingress accepts them only with the
option `--routing-hints`.
"""

import re
from collections.abc import Iterable

from forebay.events.requests import NO_HINTS, RouterOverride, RoutingHints, TaintWeight
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.openai.nvext import NAME_CHARS_MAX, Nvext, RouterFields, RoutingConstraints

WORKER_HEADER = "x-dynamo-worker-instance-id"
RANK_HEADER = "x-dynamo-dp-rank"
PRIORITY_HEADER = "x-dynamo-request-priority"
STRICT_HEADER = "x-dynamo-request-strict-priority"
CLASS_HEADER = "x-dynamo-meta-policy-class"
SESSION_HEADER = "x-dynamo-session-id"
# Dynamo's headers for a fixed prefill worker, which forebay does not support.
UNSERVED_HEADERS = ("x-dynamo-prefill-instance-id", "x-dynamo-prefill-dp-rank")
ROUTING_HEADERS = frozenset(
    {WORKER_HEADER, RANK_HEADER, PRIORITY_HEADER, STRICT_HEADER, CLASS_HEADER, SESSION_HEADER, *UNSERVED_HEADERS}
)
INTEGER = re.compile(r"-?[0-9]{1,10}")  # longer integers exceed every field

RANK_MAX = (1 << 32) - 1
PRIORITY_MAX = (1 << 31) - 1
STRICT_PRIORITY_MAX = (1 << 32) - 1

RoutingHeaders = dict[str, list[str]]


def routing_headers(headers: Iterable[tuple[str, str]]) -> RoutingHeaders:
    """Return the values of each routing header, by lower-case name. Other headers and blank values are left out."""
    found: RoutingHeaders = {}
    for name, value in headers:
        key = name.lower()
        if key in ROUTING_HEADERS and (text := value.strip()):
            found.setdefault(key, []).append(text)
    return found


def reject_hints(nvext: Nvext | None) -> None:
    """Raise ApiError if a body has a routing hint. An ingress without `--routing-hints` calls this function."""
    name = None if nvext is None else next(nvext.hints(), None)
    if name is not None:
        text = f"{name} is a routing hint, which this ingress does not accept; start it with --routing-hints"
        raise invalid(text, name, "routing_hints_disabled")


def routing_of(nvext: Nvext | None, found: RoutingHeaders) -> RoutingHints:
    """Return the routing hints of a request.

    Args:
        nvext: extension `nvext` of the body, None if it has none.
        found: values of the routing headers, from `routing_headers`. A header overrides the body.

    Raises:
        ApiError: 400 for an invalid header, or for hints that contradict each other.
    """
    if nvext is None and not found:
        return NO_HINTS
    nvext = nvext or Nvext()
    for name in UNSERVED_HEADERS:
        if name in found:
            raise invalid(f"the header {name} is not supported", name, "unsupported_parameter")
    agent = nvext.agent_hints
    priority, strict = (None, None) if agent is None else (agent.priority, agent.strict_priority)
    targets = nvext.router or RouterFields()
    constraints = nvext.routing_constraints or RoutingConstraints()
    preferred = (constraints.preferred_taints or {}).items()
    hints = RoutingHints(
        worker_id=_text(found, WORKER_HEADER) or _worker(nvext),
        rank=_integer(found, RANK_HEADER, 0, RANK_MAX, nvext.dp_rank),
        allowed_workers=tuple(dict.fromkeys(map(str, constraints.allowed_worker_ids or ()))),
        required_taints=tuple(dict.fromkeys(constraints.required_taints or ())),
        preferred_taints=tuple(TaintWeight(taint=taint, weight=weight) for taint, weight in preferred),
        session_id=_text(found, SESSION_HEADER) or nvext.session_id,
        priority=_integer(found, PRIORITY_HEADER, -PRIORITY_MAX - 1, PRIORITY_MAX, priority) or 0,
        strict_priority=_integer(found, STRICT_HEADER, 0, STRICT_PRIORITY_MAX, strict) or 0,
        policy_class=_text(found, CLASS_HEADER) or nvext.policy_class or "",
        expected_output_tokens=(agent and agent.osl) or 0,
        override=_override(nvext.router),
        ttft_target_ms=targets.ttft_target,
        itl_target_ms=targets.itl_target,
    )
    _require_consistent(hints)
    return hints


def _worker(nvext: Nvext) -> str:
    names = {str(name) for name in (nvext.backend_instance_id, nvext.decode_worker_id) if name is not None}
    if len(names) > 1:
        raise _contradiction("nvext.backend_instance_id and nvext.decode_worker_id differ", "nvext.decode_worker_id")
    return names.pop() if names else ""


def _override(router: RouterFields | None) -> RouterOverride | None:
    if router is None:
        return None
    override = RouterOverride(
        mode=router.mode,
        overlap_score_credit=router.overlap_score_credit,
        prefill_load_scale=router.prefill_load_scale,
        temperature=router.router_temperature,
        assume_kv_reuse=router.assume_kv_reuse,
        track_prefill_tokens=router.track_prefill_tokens,
    )
    return None if override == RouterOverride() else override


def _require_consistent(hints: RoutingHints) -> None:
    if hints.rank is not None and not hints.worker_id:
        raise _contradiction("dp_rank requires a worker; set backend_instance_id or the header, too", "nvext.dp_rank")
    if hints.worker_id and hints.allowed_workers and hints.worker_id not in hints.allowed_workers:
        text = f"the worker {hints.worker_id} is pinned but is not in allowed_worker_ids"
        raise _contradiction(text, "nvext.routing_constraints.allowed_worker_ids")
    if hints.override is not None and hints.override.mode == "direct" and not hints.worker_id:
        raise _contradiction(
            "the mode direct requires a worker; set backend_instance_id or the header", "nvext.router.mode"
        )


def _contradiction(message: str, param: str) -> ApiError:
    return invalid(message, param, "contradictory_routing")


def _text(found: RoutingHeaders, name: str) -> str:
    values = found.get(name)
    if values is None:
        return ""
    if len(set(values)) > 1:
        raise _contradiction(f"the header {name} occurs more than once with different values; send one", name)
    if len(values[0]) > NAME_CHARS_MAX:
        raise invalid(f"the header {name} has {len(values[0])} characters; the limit is {NAME_CHARS_MAX}", name)
    return values[0]


def _integer(found: RoutingHeaders, name: str, least: int, most: int, otherwise: int | None) -> int | None:
    text = _text(found, name)
    if not text:
        return otherwise
    if not INTEGER.fullmatch(text) or not least <= int(text) <= most:
        raise invalid(f"the header {name} is {text!r}; it must be an integer from {least} to {most}", name)
    return int(text)
