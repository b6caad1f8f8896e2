"""Active request: the request as submitted, and the state of its attempts at each stage."""

from dataclasses import dataclass, field

from forebay.core.phases import ON_WORKER, Phase
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.state_machine import digest_of
from forebay.events.decisions import Stage
from forebay.events.media import Encoded
from forebay.events.transfer import Prefilled


@dataclass(slots=True)
class ActiveRequest:
    """Request that has been submitted and has not ended. `RequestState` describes the fields that a snapshot has.

    Times are on the owner's clock, in microseconds.

    Attributes:
        sent: attempt, worker id and worker epoch of each routing since submission or restore. It distinguishes late
            progress events from events of a worker that never had the request. Not part of the state.
        failure: error of the worker that has just failed to encode, compute or fetch, until the request is routed
            again; None if no worker failed. Not part of the state.
        term: the request's current contribution to the digest.
    """

    submitted: SubmittedRequest
    phase: Phase = Phase.SUBMITTED
    stage: Stage = "aggregated"
    attempt: int = 0
    worker_id: str = ""
    worker_epoch: int = 0
    rank: int = 0
    queue_class: str = ""
    uncached_tokens: int = 0
    queued_at_us: int = 0
    queue_due_us: int = 0
    encodings: int = 0
    encoder_id: str = ""
    encoded: Encoded | None = None
    prefills: int = 0
    prefiller_id: str = ""
    prefilled: Prefilled | None = None
    prefilled_due_us: int = 0
    begun: bool = False
    decoder_id: str = ""
    prefill_pool: str = ""
    rejected_by: tuple[str, ...] = ()
    sent: list[tuple[int, str, int]] = field(default_factory=list)
    failure: str | None = None
    identity_hash: int = field(init=False)
    term: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.identity_hash = self.submitted.identity_hash()

    @property
    def on_worker(self) -> bool:
        return self.phase in ON_WORKER

    @property
    def was_dispatched(self) -> bool:
        return self.attempt > 0 or self.encodings > 0 or self.prefills > 0

    def has_kept_kv(self, now_us: int) -> bool:
        """Return whether a prefill worker still keeps the KV of the prompt, as far as the owner knows at `now_us`."""
        return self.prefilled is not None and now_us < self.prefilled_due_us

    @property
    def stage_attempt(self) -> int:
        """Last attempt at the stage for which the request was last routed."""
        return self.attempts(self.stage)

    def attempts(self, stage: Stage) -> int:
        """Return how often the request was sent to a worker for `stage`. `aggregated` and `decode` share one count."""
        if stage == "encode":
            return self.encodings
        return self.prefills if stage == "prefill" else self.attempt

    @property
    def next_encoding(self) -> int:
        """Number of the next attempt to encode the images and videos.

        It is not lower than the last attempt at the response. Otherwise readers of the reply slot would ignore an error
        that the encode worker writes.
        """
        return max(self.encodings + 1, self.attempt)


def request_term(request: ActiveRequest) -> int:
    """Return the 64-bit contribution of a request to the digest of all active requests."""
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
        *((request.prefill_pool,) if request.prefill_pool else ()),
        *((("rejected_by", *request.rejected_by),) if request.rejected_by else ()),
        seed=request.identity_hash,
    )
