"""Active request: the request as submitted, and the record of its stages."""

from dataclasses import dataclass, field

from forebay.core.phases import ON_WORKER, Phase
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.state_machine import digest_of
from forebay.events.decisions import Stage
from forebay.events.media import Encoded
from forebay.events.transfer import Prefilled


@dataclass(slots=True)
class ActiveRequest:
    """Active request.

    Attributes:
        submitted: request as submitted.
        phase: phase in the transition table.
        stage: stage of the last routing.
        attempt: last attempt at the response, counted from 1; 0 before the first.
        worker_id: worker of the last routing.
        worker_epoch: epoch of that worker.
        rank: rank of that worker.
        queue_class: class in which it is or was queued; empty if it never was.
        uncached_tokens: prompt tokens that the best rank did not have cached when it was queued.
        queued_at_us: when it was queued.
        queue_due_us: when it times out in the queue; 0 if only its deadline applies.
        encodings: last attempt to encode its media.
        encoder_id: worker of that attempt.
        encoded: location of the embeddings, if they are available.
        prefills: last attempt to compute its prompt in a prefill pool.
        prefiller_id: worker of that attempt.
        prefilled: location of the KV, if a prefill worker keeps it.
        prefilled_due_us: when that KV's lease expires.
        begun: whether output tokens exist; tracked for decode pools only.
        decoder_id: worker that was last sent to fetch the KV.
        sent: attempt, worker and epoch of each routing since submission or restore. Not part of the state: it only
            separates late progress from progress of a worker that never had the request.
        identity_hash: hash of `submitted`.
        term: current contribution to the digest.
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
    sent: list[tuple[int, str, int]] = field(default_factory=list)
    identity_hash: int = field(init=False)
    term: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.identity_hash = self.submitted.identity_hash()

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
