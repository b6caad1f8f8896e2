"""The supported part of Dynamo's request extension `nvext`, and routing hints in it and in headers.

Unsupported fields are rejected by name. A header overrides the body, as in Dynamo. Unlike Dynamo, forebay rejects
invalid headers and contradictory hints. Routing hints are for trusted clients, because a client that pins workers or
raises its priority takes capacity from others. So an ingress accepts them only with the option `--routing-hints`.

Source: Dynamo's frontend reference and `protocols/openai/nvext`. forebay adds `policy_class`, `router` (the overrides
of Dynamo's Python API) and `routing_constraints.allowed_worker_ids`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from forebay.events.control import RouterMode
from forebay.events.numbers import PIN_S_MAX
from forebay.events.rendering import Api
from forebay.events.requests import NO_HINTS, RouterOverride, RoutingHints, TaintWeight
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.openai.fields import CheckedBody, Neutral, at_most

QUERY = "query_instance_id"
WORKER_ID = "worker_id"

NAME_CHARS_MAX = 256  # maximum length of a name in an event
TAINTS_MAX = 64  # per request: each is compared with the taints of every worker
WORKERS_MAX = 1_024  # per request; a larger set should be a pool
STRINGS_MAX = 16  # annotations and extra fields; fewer exist
WEIGHT_MAX = 1e6  # keeps every cost finite
TARGET_MS_MAX = 1e9  # as in events
TTL_UNITS_S = {"s": 1, "m": 60, "h": 3600}
TTL = "5m"  # if a request has none; as in Dynamo
U32 = 1 << 32
U64 = 1 << 64

Text = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
WorkerId = Text | Annotated[int, Field(ge=0, lt=U64)]  # a number in Dynamo, a name in forebay
Weight = Annotated[float, Field(ge=0.0, le=WEIGHT_MAX, allow_inf_nan=False)]
Target = Annotated[float, Field(ge=0.0, le=TARGET_MS_MAX, allow_inf_nan=False)]  # in milliseconds, as in Dynamo
SignedWeight = Annotated[float, Field(ge=-WEIGHT_MAX, le=WEIGHT_MAX, allow_inf_nan=False)]


class AgentHints(CheckedBody):
    """`nvext.agent_hints`: queue priorities of a request, and its expected number of output tokens (`osl`)."""

    path = "nvext.agent_hints."
    neutral: ClassVar[Neutral] = {"latency_sensitivity": (None,), "speculative_prefill": (None, False)}

    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    strict_priority: Annotated[int, Field(ge=0, lt=U32)] | None = None
    osl: Annotated[int, Field(ge=0, lt=U32)] | None = None


class SessionControl(CheckedBody):
    """`nvext.session_control`: id of the session that a request belongs to."""

    path = "nvext.session_control."
    # A session opens with its first request, and the pool's `session_ttl_s` sets how long it is kept. 300 s is the
    # default of clients.
    neutral: ClassVar[Neutral] = {"action": (None, "open"), "timeout": (None, 300)}

    session_id: Text


class AgentContext(CheckedBody):
    """`nvext.agent_context`: the agent that sent a request. Its `session_id` is used without a `session_control`."""

    path = "nvext.agent_context."
    neutral: ClassVar[Neutral] = {"kv_hints": (None,), "session_final": (None, False)}
    ignored = frozenset({"parent_session_id", "parent_trajectory_id", "session_type_id", "trajectory_id"})

    session_id: Text | None = None


class RoutingConstraints(CheckedBody):
    """`nvext.routing_constraints`: the workers that may serve a request, and taints it requires or prefers.

    Attributes:
        allowed_worker_ids: ids of the workers that may serve the request; None allows all.
        required_taints: labels that the worker must have.
        preferred_taints: weight per label; workers with a label of positive weight are preferred, of negative avoided.
    """

    path = "nvext.routing_constraints."

    # An empty list would allow no worker, but in events it allows all workers.
    allowed_worker_ids: Annotated[list[WorkerId], Field(min_length=1, max_length=WORKERS_MAX)] | None = None
    required_taints: Annotated[list[Text], Field(max_length=TAINTS_MAX)] | None = None
    preferred_taints: Annotated[dict[Text, SignedWeight], at_most(TAINTS_MAX)] | None = None


class CacheControl(CheckedBody):
    """`nvext.cache_control`: keep the KV of the prompt in host memory and on the disk of its worker for some time.

    Attributes:
        type: kind of the pin.
        ttl: duration, a number with the unit `s`, `m` or `h`, at most an hour; None for 5 minutes.
    """

    path = "nvext.cache_control."

    type: Literal["ephemeral"]
    ttl: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}[smh]$")] | None = None

    @model_validator(mode="after")
    def _check(self) -> "CacheControl":
        if self.seconds > PIN_S_MAX:
            raise invalid(f"a prompt can be pinned for at most 1h, not {self.ttl}", "nvext.cache_control.ttl")
        return self

    @property
    def seconds(self) -> int:
        ttl = self.ttl or TTL
        return int(ttl[:-1]) * TTL_UNITS_S[ttl[-1]]


class RouterFields(CheckedBody):
    """`nvext.router`: settings of the router that one request overrides. None keeps the setting of the pool.

    Attributes:
        mode: router mode.
        overlap_score_credit: prefill blocks that the cost is reduced by per cached block.
        prefill_load_scale: weight of prefill blocks in the cost.
        router_temperature: softmax temperature of the selection.
        assume_kv_reuse: whether a shared prefix of running requests counts once.
        track_prefill_tokens: whether prompts that are not computed yet count as load.
        ttft_target: wanted time to first token in milliseconds, by which a grid chooses the pool.
        itl_target: wanted inter-token latency in milliseconds, by which a grid chooses the pool.
    """

    path = "nvext.router."
    neutral: ClassVar[Neutral] = {"shared_cache_multiplier": (None, 0)}

    mode: RouterMode | None = None
    overlap_score_credit: Weight | None = None
    prefill_load_scale: Weight | None = None
    router_temperature: Weight | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None
    ttft_target: Target | None = None
    itl_target: Target | None = None


class Nvext(CheckedBody):
    """Field `nvext` of a request: Dynamo's extension of OpenAI's API, with hints for routing and caching."""

    path = "nvext."
    neutral: ClassVar[Neutral] = {
        "greed_sampling": (None, False),
        "max_thinking_tokens": (None,),
        "metadata_upload": (None,),
        "prefill_dp_rank": (None,),
        "prefill_worker_id": (None,),
        "token_data": (None,),
        "use_raw_prompt": (None, False),
    }
    ignored = frozenset({"request_timestamp_ms"})  # for traces; forebay uses the clock of the owner

    annotations: Annotated[list[str], Field(max_length=STRINGS_MAX)] | None = None
    extra_fields: Annotated[list[str], Field(max_length=STRINGS_MAX)] | None = None
    cache_salt: Annotated[str, Field(max_length=NAME_CHARS_MAX)] | None = None
    backend_instance_id: WorkerId | None = None
    decode_worker_id: WorkerId | None = None
    dp_rank: Annotated[int, Field(ge=0, lt=U32)] | None = None
    policy_class: Text | None = None
    agent_hints: AgentHints | None = None
    session_control: SessionControl | None = None
    agent_context: AgentContext | None = None
    routing_constraints: RoutingConstraints | None = None
    router: RouterFields | None = None
    cache_control: CacheControl | None = None

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        query = {"anyOf": [{"const": QUERY}, {"type": "string", "pattern": f"^{QUERY}:"}]}
        for name, items in (("annotations", query), ("extra_fields", {"const": WORKER_ID})):
            listed = {"type": "array", "items": items, "maxItems": STRINGS_MAX}
            schema["properties"][name] = {"anyOf": [listed, {"type": "null"}]}

    @model_validator(mode="after")
    def _check(self) -> "Nvext":
        for name in self.annotations or ():
            if not _is_query(name):
                raise invalid(f"the annotation {name!r} is not supported", "nvext.annotations", "unsupported_parameter")
        for name in self.extra_fields or ():
            if name != WORKER_ID:
                text = f"the extra field {name!r} is not supported"
                raise invalid(text, "nvext.extra_fields", "unsupported_parameter")
        return self

    @property
    def session_id(self) -> str:
        """Session id in `session_control`, else in `agent_context`; empty if neither has one."""
        if self.session_control is not None:
            return self.session_control.session_id
        return (self.agent_context and self.agent_context.session_id) or ""

    def hints(self) -> Iterator[str]:
        """Yield the path in the body of each routing hint that is set, such as `nvext.router.mode`."""
        for name in HINTS:
            value: Any = getattr(self, name)
            if isinstance(value, BaseModel):
                for part in type(value).model_fields:
                    if getattr(value, part) is not None:
                        yield f"nvext.{name}.{part}"
            elif value is not None:
                yield f"nvext.{name}"


class ForebayOptions(CheckedBody):
    """`forebay`: options of this server."""

    path = "forebay."

    detach: bool | None = Field(
        default=None, description="Whether the request outlives its connection, and its answer is kept."
    )


class RoutedBody(CheckedBody):
    """Base of the bodies of requests that workers run.

    Attributes:
        endpoint: API of the route, which is also its name in metrics.
        id_prefix: begin of the random id of a request whose client chose none.
        names: parameters of `completion` that have another name in the body.
    """

    endpoint: ClassVar[Api]
    id_prefix: ClassVar[str]
    names: ClassVar[Mapping[str, str]] = {}

    model: str = Field(description="Name of the model or of one of its LoRA adapters.")
    cache_salt: Annotated[str, Field(max_length=NAME_CHARS_MAX)] | None = Field(
        default=None, description="Requests share cached blocks only if their salts are equal."
    )
    nvext: Nvext | None = Field(
        default=None, description="Hints for routing and caching, see [routing.md](routing.md)."
    )
    forebay: ForebayOptions | None = Field(
        default=None, description="Options of this server, see [answers.md](answers.md)."
    )

    @property
    def outlives(self) -> bool:
        """Whether the request is not cancelled if its client disconnects. Its answer is kept."""
        return self.forebay is not None and bool(self.forebay.detach)

    @property
    def end_user(self) -> str:
        """Name that the client gives its own user; empty if it gives none."""
        extra = self.model_extra or {}
        given = (extra.get("safety_identifier"), extra.get("user"))
        return next((name for name in given if isinstance(name, str) and name), "")

    @property
    def options(self) -> str:
        """Fields that determine the response in the format of the API, as `Rendering.options` has them."""
        return ""

    @property
    def conversation(self) -> str:
        """Items of the conversation as `Rendering.input` has them; empty if no request may continue it."""
        return ""

    @property
    def cache_namespace(self) -> str:
        """Salt of the block hashes: `nvext.cache_salt`, else `cache_salt`. Empty if the client set none."""
        return (self.nvext and self.nvext.cache_salt) or self.cache_salt or ""

    @property
    def queries_route(self) -> bool:
        """Whether the request is a route query: it returns the worker that would be selected, and generates nothing."""
        return self.nvext is not None and bool(self.nvext.annotations)

    def renamed(self, error: ApiError) -> ApiError:
        """Return an error that was raised while `completion` was prepared, with the parameter as this body names it.

        Only the first place in the message is changed, because texts of the client follow.
        """
        param, own = error.param or "", self.own_name(error.param or "")
        message = error.message.replace(param, own, 1)
        return ApiError(error.status, error.code, message, own or None, retry_after_s=error.retry_after_s)

    def own_name(self, param: str) -> str:
        """Return the name in this body of a parameter of `completion`."""
        return self.names.get(param, param)

    @property
    def kv_pin_s(self) -> int:
        """Seconds for which the KV of the prompt is pinned; 0 if the client pins nothing."""
        pin = self.nvext and self.nvext.cache_control
        return pin.seconds if pin else 0


HINTS = tuple(name for name in Nvext.model_fields if name not in ("annotations", "extra_fields", "cache_salt"))


def _is_query(annotation: str) -> bool:
    return annotation == QUERY or annotation.startswith(f"{QUERY}:")


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
    name = None if nvext is None else next(nvext.hints(), None)
    if name is not None:
        text = f"{name} is a routing hint, which this ingress does not accept; start it with --routing-hints"
        raise invalid(text, name, "routing_hints_disabled")


def routing_of(nvext: Nvext | None, found: RoutingHeaders) -> RoutingHints:
    """Return the hints of a request. Raises ApiError (400) for an invalid header, or for contradictory hints."""
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
        rank=_integer(found, RANK_HEADER, 0, U32 - 1, nvext.dp_rank),
        allowed_workers=tuple(dict.fromkeys(map(str, constraints.allowed_worker_ids or ()))),
        required_taints=tuple(dict.fromkeys(constraints.required_taints or ())),
        preferred_taints=tuple(TaintWeight(taint=taint, weight=weight) for taint, weight in preferred),
        session_id=_text(found, SESSION_HEADER) or nvext.session_id,
        priority=_integer(found, PRIORITY_HEADER, -(1 << 31), (1 << 31) - 1, priority) or 0,
        strict_priority=_integer(found, STRICT_HEADER, 0, U32 - 1, strict) or 0,
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
