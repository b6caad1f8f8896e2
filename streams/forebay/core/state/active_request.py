"""State of one active request, how it is built from events, and its contribution to the digest."""

from array import array
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from forebay.core.phases import ON_WORKER, Phase
from forebay.core.state_machine import digest_of
from forebay.events.base import array_u64
from forebay.events.decisions import Stage
from forebay.events.media import Encoded
from forebay.events.requests import RequestSubmitted, RouteQueried, RoutingHints, Task
from forebay.events.transfer import Prefilled


@dataclass(slots=True)
class ActiveRequest:
    """Active request.

    Attributes:
        request_id: id of the request.
        content: hash of the content, see `content_hash`.
        offset: offset of its `RequestSubmitted`.
        due_us: deadline on the owner's clock, in microseconds.
        reply_slot: partition of the topic `tokens` that gets the response.
        prompt_tokens: length of the prompt.
        tie_seed: seed for tie-breaking and sampling.
        pool: pool that generates the response.
        blocks: sequence hashes of the full prompt blocks.
        packed: `blocks` as packed u64, kept for snapshots.
        hints: routing hints of the client.
        lora_name: adapter; empty for none.
        task: what is generated: text or an embedding.
        media_tokens: placeholder tokens of its images and videos.
        identity_hash: hash of the fields that never change.
        term: current contribution to the digest.
        phase: phase in the transition table.
        attempt: last attempt at the response, counted from 1; 0 before the first.
        worker_id: worker of the last routing.
        worker_epoch: epoch of that worker.
        rank: rank of that worker.
        queue_class: class in which it is or was queued; empty if it never was.
        uncached_tokens: prompt tokens that the best rank did not have cached when it was queued.
        queued_at_us: when it was queued.
        stage: stage of the last routing.
        encodings: last attempt to encode its media.
        encoder_id: worker of that attempt.
        encoded: location of the embeddings, if they are available.
        prefills: last attempt to compute its prompt in a prefill pool.
        prefiller_id: worker of that attempt.
        prefilled: location of the KV, if a prefill worker keeps it.
        prefilled_due_us: when that KV's lease expires.
        begun: whether output tokens exist; tracked for decode pools only.
        decoder_id: worker that was last sent to fetch the KV.
        ingress: incarnation of the ingress whose HTTP client waits; empty if there is none.
        queue_due_us: when it times out in the queue; 0 if only its deadline applies.
        patient: whether the queue's bounds do not apply; used on submission only and not part of the state.
        sent: attempt, worker and epoch of each routing since submission or restore. Not part of the state: it only
            separates late progress from progress of a worker that never had the request.
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
    identity_hash: int = 0
    term: int = 0
    phase: Phase = Phase.SUBMITTED
    attempt: int = 0
    worker_id: str = ""
    worker_epoch: int = 0
    rank: int = 0
    queue_class: str = ""
    uncached_tokens: int = 0
    queued_at_us: int = 0
    stage: Stage = "aggregated"
    encodings: int = 0
    encoder_id: str = ""
    encoded: Encoded | None = None
    prefills: int = 0
    prefiller_id: str = ""
    prefilled: Prefilled | None = None
    prefilled_due_us: int = 0
    begun: bool = False
    decoder_id: str = ""
    ingress: str = ""
    queue_due_us: int = 0
    patient: bool = False
    sent: list[tuple[int, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.identity_hash = digest_of(
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
            seed=self.content,
        )

    @property
    def on_worker(self) -> bool:
        """Whether a worker has the request now."""
        return self.phase in ON_WORKER

    @property
    def was_dispatched(self) -> bool:
        """Whether it was ever sent to a worker, at any stage."""
        return self.attempt > 0 or self.encodings > 0 or self.prefills > 0

    def has_kept_kv(self, now_us: int) -> bool:
        """Return whether a worker still keeps the KV of the prompt, as far as the owner knows."""
        return self.prefilled is not None and now_us < self.prefilled_due_us

    @property
    def stage_attempt(self) -> int:
        """Last attempt at the current or most recent stage."""
        return self.attempts(self.stage)

    def attempts(self, stage: Stage) -> int:
        """Return how often it was sent to a worker for this stage; `aggregated` and `decode` share one count."""
        if stage == "encode":
            return self.encodings
        return self.prefills if stage == "prefill" else self.attempt

    @property
    def next_encoding(self) -> int:
        """Number of the next encoding.

        At least the last attempt at a response, or the encoder's error would be stale.
        """
        return max(self.encodings + 1, self.attempt)


def request_from_event(event: RequestSubmitted, pool: str, offset: int, now_us: int) -> ActiveRequest:
    """Return the new request of an event at `offset`; its deadline counts from `now_us`."""
    return ActiveRequest(
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
        patient=event.patient,
    )


def request_from_query(event: RouteQueried, pool: str) -> ActiveRequest:
    """Return a request for a route query; it is never added to the active requests."""
    return ActiveRequest(
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


def content_hash(event: RequestSubmitted) -> int:
    """Return a 64-bit hash of what identifies the content: not the reply slot, timeout, times or routing hints."""
    media = [(one.kind, one.digest, one.first_token, one.tokens) for one in event.media]
    names = event.model, event.lora_name, event.cache_namespace, event.task
    return digest_of(*names, event.nonce, event.sampling, media, seed=xxh3_64_intdigest(event.token_ids))


def id_hash(request_id: str) -> int:
    """Return the hash under which an ended request's id is remembered."""
    return xxh3_64_intdigest(request_id.encode())


def request_term(request: ActiveRequest) -> int:
    """Return the contribution of a request to the digest."""
    return digest_of(
        request.phase,
        request.attempt,
        request.worker_id,
        request.worker_epoch,
        request.rank,
        request.queue_class,
        request.uncached_tokens,
        request.queued_at_us,
        request.queue_due_us,
        request.stage,
        request.encodings,
        request.encoder_id,
        request.encoded,
        request.prefills,
        request.prefiller_id,
        request.prefilled,
        request.prefilled_due_us,
        request.begun,
        request.decoder_id,
        seed=request.identity_hash,
    )
