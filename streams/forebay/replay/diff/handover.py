"""Collect the input for a simulator that continues at the fork of a comparison.

The fork is the first event after which history and the alternative decide differently. The input consists of the state
of both worlds at the fork, and of the requests and external events after it. One entry per request is kept in memory,
with its block hashes. Requests that are active at the fork restart there, because their progress at that moment is
unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.pool_registry import PoolEvent
from forebay.core.step import AnyDecision, InputEvent
from forebay.core.world import World
from forebay.events.control import BusyThresholdsSet, DisaggregationSet, PolicySet, PoolConfigured
from forebay.events.decisions import RequestHeld, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerJoined, WorkerLost
from forebay.events.progress import FirstTokenEmitted, OnboardedTokens, PrefillFinished, RequestFinished
from forebay.events.requests import RequestCancelled, RequestSubmitted, RoutingHints
from forebay.events.snapshots import Booking, Chunk, CommandState, Remembered, Reported, RequestState

REQUEST_CHUNKS = Booking | CommandState | Remembered | Reported | RequestState


@dataclass(slots=True)
class RecordedRequest:
    """A request as input for a simulator, with its outcome in history. Times are in microseconds on the owner's clock.

    Attributes:
        sequence_hashes: block hashes of the prompt, packed.
        lora_name: LoRA adapter; empty for none.
        in_flight: whether the request was already active where the simulation begins, and restarts there.
        worker: worker ID and rank of the last attempt in history; None if there was no attempt.
        first_us: when the router received the first-token event; 0 if it received none.
        last_us: when the router received the end; 0 if it received none.
        cancelled_us: when the client disconnected; 0 if it did not.
        cached_tokens: prompt tokens cached on the rank that computed the prompt.
        output_tokens: number of output tokens; None if history did not finish the request.
        stamped_us: wall clock of the ingress at submission; 0 if unknown.
        first_stamped_us: wall clock of the worker at the first token; 0 if unknown.
        prefiller: worker ID and rank that computed the prompt for `worker`; None if `worker` computed it.
        prefilled_us: when the router received the prefill result; 0 if it received none.
        kept_bytes: size of the KV that the prefill worker kept, in bytes; 0 if unknown.
        transferred_bytes: bytes of that KV that were transferred; 0 if unknown.
        transfer_us: duration of the transfer on the receiver's clock; 0 if unknown.
        onboarded: the part of `cached_tokens` that was loaded from other tiers.
    """

    request_id: str
    at_us: int
    model: str
    prompt_tokens: int
    sequence_hashes: bytes
    tie_seed: int
    timeout_us: int
    hints: RoutingHints
    lora_name: str
    in_flight: bool
    worker: tuple[str, int] | None = None
    attempts: int = 0
    first_us: int = 0
    last_us: int = 0
    cancelled_us: int = 0
    cached_tokens: int = 0
    output_tokens: int | None = None
    stamped_us: int = 0
    first_stamped_us: int = 0
    prefiller: tuple[str, int] | None = None
    prefills: int = 0
    prefilled_us: int = 0
    kept_bytes: int = 0
    transferred_bytes: int = 0
    transfer_us: int = 0
    onboarded: tuple[OnboardedTokens, ...] = ()


class RequestCollector:
    """Collects requests and their outcomes in history, event by event.

    Attributes:
        requests: the collected requests, in order of arrival. An ID may occur twice.
    """

    def __init__(self) -> None:
        self.requests: list[RecordedRequest] = []
        self._open: dict[str, RecordedRequest] = {}

    def begin(self, history: World, event: InputEvent | None, now_us: int) -> None:
        """Add the requests that are active in `history`, except a request that `event` has just submitted."""
        new = event.request_id if isinstance(event, RequestSubmitted) else None
        for request in history.requests.active():
            if request.submitted.request_id != new:
                self._add(_restarted(request, history.pools[request.submitted.pool].model, now_us))

    def observe(self, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision], *, accepted: bool) -> None:
        """Process one event of history.

        Args:
            event: the event; None if it did not decode.
            now_us: the owner's clock when it applied the event, in microseconds.
            decided: history's decisions that follow from the event.
            accepted: False if history ignored the event because it was stale.
        """
        match event:
            case RequestSubmitted() if _is_new(event, decided):
                self._add(_submitted(event, now_us))
            case RequestCancelled() if event.request_id in self._open:
                self._open[event.request_id].cancelled_us = now_us
            case PrefillFinished() if accepted and event.request_id in self._open:
                requests, prefilled = self._open[event.request_id], event.prefilled
                requests.prefilled_us, requests.kept_bytes = now_us, prefilled.bytes
                requests.cached_tokens, requests.onboarded = prefilled.cached_tokens, event.onboarded
            case FirstTokenEmitted() | RequestFinished() if accepted:
                self._progress(event, now_us)
            case _:
                pass
        for decision in decided:
            if isinstance(decision, RequestRouted) and decision.request_id in self._open:
                _note_routed(self._open[decision.request_id], decision)

    def _add(self, requests: RecordedRequest) -> None:
        self.requests.append(requests)
        self._open[requests.request_id] = requests

    def _progress(self, event: FirstTokenEmitted | RequestFinished, now_us: int) -> None:
        requests = self._open.get(event.request_id)
        if requests is None:
            return
        if isinstance(event, FirstTokenEmitted):
            if not requests.first_us:
                requests.first_us, requests.first_stamped_us = now_us, event.at_us
                requests.transferred_bytes, requests.transfer_us = event.transferred_bytes, event.transfer_us
                if requests.prefiller is None:
                    requests.cached_tokens, requests.onboarded = event.cached_tokens, event.onboarded
            return
        requests.last_us, requests.output_tokens = now_us, event.output_tokens
        del self._open[event.request_id]


OperatorEvent = PoolConfigured | PoolEvent | BusyThresholdsSet | DisaggregationSet | PolicySet
TimedOperatorEvent = tuple[int, OperatorEvent]


@dataclass(slots=True)
class Handover:
    """State at the fork and external events after it, from which a simulator continues.

    Empty if history and the alternative never decide differently.

    Attributes:
        at_us: the owner's clock at the fork, in microseconds.
        states: the world of history and the world of the alternative at the fork, as snapshot chunks without requests.
        operator_events: configuration changes by operators after the fork, with their times, as applied in history and
            as applied in the alternative.
        joined: number of workers that joined after the fork.
        lost: number of workers that were lost after the fork.
    """

    at_us: int = 0
    states: tuple[list[Chunk], list[Chunk]] = field(default_factory=lambda: ([], []))
    operator_events: tuple[list[TimedOperatorEvent], list[TimedOperatorEvent]] = field(default_factory=lambda: ([], []))
    joined: int = 0
    lost: int = 0
    _requests: RequestCollector = field(default_factory=RequestCollector)

    @property
    def requests(self) -> list[RecordedRequest]:
        """The requests from the fork on, in order of arrival. An ID may occur twice."""
        return self._requests.requests

    def begin(self, history: World, other: World, event: InputEvent | None, now_us: int) -> None:
        """Start to collect at the fork. `event` led to the different decisions; None if only the configuration did."""
        self.at_us = now_us
        self.states = (state_of(history), state_of(other))
        self._requests.begin(history, event, now_us)

    def observe(self, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision], *, accepted: bool) -> None:
        """Process one event of history at the fork or later; arguments as for `RequestCollector.observe`."""
        self._requests.observe(event, now_us, decided, accepted=accepted)
        self.joined += isinstance(event, WorkerJoined)
        self.lost += isinstance(event, WorkerLost)

    def configure(self, events: Sequence[OperatorEvent], now_us: int) -> None:
        """Record an operator's change after the fork, as applied in history and in the alternative."""
        for operator_events, event in zip(self.operator_events, events, strict=True):
            operator_events.append((now_us, event))


def state_of(world: World) -> list[Chunk]:
    """Return the snapshot chunks of a world without requests and commands.

    The function may be called between two journal records, when `world.consumed` is not empty. The chunks do not
    contain `consumed`, which is not part of a state.
    """
    consumed = list(world.consumed)
    world.consumed.clear()
    chunks: list[Chunk] = [chunk for chunk in world.snapshot() if not isinstance(chunk, REQUEST_CHUNKS)]
    world.consumed.extend(consumed)
    return chunks


def _note_routed(requests: RecordedRequest, routed: RequestRouted) -> None:
    """Record that a request was sent to a worker."""
    where = routed.worker_id, routed.rank
    if routed.stage == "prefill":
        requests.prefiller, requests.prefills = where, routed.attempt
    elif routed.stage != "encode":
        requests.worker, requests.attempts = where, routed.attempt
        if routed.stage == "aggregated":
            requests.prefiller = None


def _is_new(event: RequestSubmitted, decided: Sequence[AnyDecision]) -> bool:
    """Return whether history treated the submission as a new request and not as a duplicate."""
    return any(
        isinstance(one, RequestRouted | RequestHeld | RequestRejected)
        and one.request_id == event.request_id
        and getattr(one, "reason", "") != "duplicate_id"
        for one in decided
    )


def _submitted(event: RequestSubmitted, now_us: int) -> RecordedRequest:
    return RecordedRequest(
        event.request_id,
        now_us,
        event.model,
        event.prompt_tokens,
        event.sequence_hashes,
        event.tie_seed,
        event.timeout_us,
        event.routing,
        event.lora_name,
        in_flight=False,
        stamped_us=event.at_us,
    )


def _restarted(request: ActiveRequest, model: str, now_us: int) -> RecordedRequest:
    return RecordedRequest(
        request.submitted.request_id,
        now_us,
        model,
        request.submitted.prompt_tokens,
        request.submitted.packed,
        request.submitted.tie_seed,
        max(1, request.submitted.due_us - now_us),
        request.submitted.hints,
        request.submitted.lora_name,
        in_flight=True,
    )
