"""Request as a client submitted it, built from an event. It never changes while the request is active."""

from array import array

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from forebay.core.state_machine import digest_of
from forebay.events.base import array_u64
from forebay.events.requests import Delivery, RequestSubmitted, RouteQueried, RoutingHints, Task, reply_key_of


class SubmittedRequest(msgspec.Struct, frozen=True):
    """Request as a client submitted it. `RequestState` describes the fields that a snapshot has.

    For the routing of one stage there is a changed copy, see `forebay.core.selection.stages`.

    Attributes:
        blocks: sequence hashes of the full prompt blocks.
        packed: `blocks` as packed u64, kept for snapshots.
        patient: whether the request ignores the length limit and the timeout of the queue. It is used on submission
            only and is not part of the state.
    """

    request_id: str
    content: int
    offset: int
    due_us: int
    reply_slot: int
    prompt_tokens: int
    tie_seed: int
    pool: str
    blocks: "array[int]"
    packed: bytes
    hints: RoutingHints
    lora_name: str
    task: Task
    media_tokens: int = 0
    ingress: str = ""
    further_ingresses: tuple[str, ...] = ()
    is_salted: bool = False
    patient: bool = False
    idempotency_key: int = 0
    delivery: Delivery = "worker"
    tenant: str = ""
    weight: int = 1

    @property
    def reply_key(self) -> int:
        return reply_key_of(self.tie_seed)

    @property
    def is_external(self) -> bool:
        """Whether a gateway sends the request to the server of the selected worker, so the owner cannot retry it."""
        return self.delivery == "external"

    @property
    def ingresses(self) -> tuple[str, ...]:
        """Incarnations of all ingresses whose clients wait; empty if the request outlives them."""
        return (self.ingress, *self.further_ingresses) if self.ingress else ()

    def identity_hash(self) -> int:
        """Return a 64-bit digest over all fields except `patient`. `content` covers `is_salted`."""
        return digest_of(
            self.request_id,
            self.offset,
            self.due_us,
            self.pool,
            self.reply_slot,
            self.prompt_tokens,
            self.tie_seed,
            xxh3_64_intdigest(self.packed),
            self.lora_name,
            self.task,
            self.media_tokens,
            self.ingress,
            self.hints,
            *((("idempotency_key", self.idempotency_key),) if self.idempotency_key else ()),
            *((self.delivery,) if self.delivery != "worker" else ()),
            *((("tenant", self.tenant, self.weight),) if self.tenant or self.weight != 1 else ()),
            *((("further_ingresses", *self.further_ingresses),) if self.further_ingresses else ()),
            seed=self.content,
        )


def request_from_event(event: RequestSubmitted, pool: str, offset: int, now_us: int) -> SubmittedRequest:
    """Return the request of a new submission. Its deadline counts from `now_us` on the owner's clock."""
    return SubmittedRequest(
        request_id=event.request_id,
        content=content_hash(event),
        offset=offset,
        due_us=now_us + event.timeout_us,
        reply_slot=event.reply_slot,
        prompt_tokens=event.prompt_tokens,
        tie_seed=event.tie_seed,
        pool=pool,
        blocks=array_u64(event.sequence_hashes),
        packed=event.sequence_hashes,
        hints=event.routing,
        lora_name=event.lora_name,
        task=event.task,
        media_tokens=sum(one.tokens for one in event.media),
        ingress=event.ingress_incarnation,
        is_salted=bool(event.cache_namespace),
        patient=event.patient,
        idempotency_key=event.idempotency_key,
        delivery=event.delivery,
        tenant=event.tenant,
        weight=event.weight,
    )


def request_from_query(event: RouteQueried, pool: str) -> SubmittedRequest:
    """Return the request that a route query asks about. It never becomes active."""
    return SubmittedRequest(
        request_id=event.request_id,
        content=0,
        offset=0,
        due_us=0,
        reply_slot=event.reply_slot,
        prompt_tokens=event.prompt_tokens,
        tie_seed=event.tie_seed,
        pool=pool,
        blocks=array_u64(event.sequence_hashes),
        packed=event.sequence_hashes,
        hints=event.routing,
        lora_name=event.lora_name,
        task="generate",
    )


def in_pool(request: SubmittedRequest, pool: str) -> SubmittedRequest:
    return request if request.pool == pool else replace(request, pool=pool)


def content_hash(event: RequestSubmitted) -> int:
    """Return a 64-bit hash that is equal if an event submits the same request again.

    It covers the model, the prompt with its images and videos, the sampling parameters and the nonce. It does not cover
    the reply slot, the timeout, times and routing hints.
    """
    media = [(one.kind, one.digest, one.first_token, one.tokens) for one in event.media]
    names: tuple[str, ...] = event.model, event.lora_name, event.cache_namespace, event.task
    if event.task == "call":
        names = *names, event.routing.endpoint, event.payload
    return digest_of(*names, event.nonce, event.sampling, media, seed=xxh3_64_intdigest(event.token_ids))


def id_hash(request_id: str) -> int:
    """Return the 64-bit hash under which the id of an ended request is remembered."""
    return xxh3_64_intdigest(request_id.encode())
