"""Read the observed history of a recording as input for the simulator.

The input consists of the initial state, and the requests and external events after it. One entry per request is kept in
memory, with its block hashes. Requests that are active at the beginning restart there, because their progress at that
moment is unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.core.rederive import Divergence
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.state.active_request import ActiveRequest
from forebay.core.step import AnyDecision, InputEvent
from forebay.core.world import World
from forebay.events.control import PoolSetting, WorkerCommanded
from forebay.events.decisions import RequestHeld, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerDraining, WorkerJoined, WorkerLost, WorkerRecovered, WorkerSuspect
from forebay.events.progress import FirstTokenEmitted, OnboardedTokens, PrefillFinished, RequestFinished
from forebay.events.requests import RequestCancelled, RequestSubmitted, RoutingHints
from forebay.events.snapshots import Booking, Chunk, CommandState, Remembered, Reported, RequestState
from forebay.journal.reader import JournalReader, read_whole
from forebay.replay.verify.verify import PROGRESS_EVERY, OnProgress
from forebay.transport.base import Log

REQUEST_CHUNKS = Booking | CommandState | Remembered | Reported | RequestState
FleetFact = WorkerSuspect | WorkerRecovered | WorkerDraining | WorkerLost
ExternalEvent = PoolSetting | WorkerJoined | FleetFact


@dataclass(slots=True)
class ObservedRequest:
    """A request as input for a simulator, with its observed outcome. Times are in microseconds on the owner's clock.

    Attributes:
        in_flight: whether the request was already active where the simulation begins, and restarts there.
        first_us: when the router received the first-token event; 0 if it received none.
        cached_tokens: prompt tokens cached on the rank that computed the prompt.
        prefiller: worker ID and rank that computed the prompt for `worker`; None if `worker` computed it.
        kept_bytes: size of the KV that the prefill worker kept; 0 if unknown.
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
    prefiller: tuple[str, int] | None = None
    prefills: int = 0
    prefilled_us: int = 0
    kept_bytes: int = 0
    transferred_bytes: int = 0
    transfer_us: int = 0
    onboarded: tuple[OnboardedTokens, ...] = ()


@dataclass(slots=True)
class ObservedHistory:
    """Observed history of one group.

    Attributes:
        state: snapshot chunks of the group's world at the beginning, without requests.
        requests: requests in order of arrival. The first ones are the requests that are active at the beginning.
        external_events: configuration changes, and fleet events that had an effect. Each comes with the owner's clock
            when it was applied, in microseconds.
    """

    state: list[Chunk]
    requests: list[ObservedRequest]
    external_events: list[tuple[int, ExternalEvent]] = field(default_factory=list)
    begin_us: int = 0
    end_us: int = 0
    commands: int = 0
    divergence: Divergence | None = None
    unverified: dict[str, int] = field(default_factory=dict)


class _HistoryCollector:
    """Collects an observed history while a reader derives, and thereby verifies, its decisions."""

    def __init__(self, reader: JournalReader) -> None:
        """Register with `reader`, which must not have begun."""
        world = reader.world
        self._world = world
        self._open: dict[str, ObservedRequest] = {}
        self._void = self._voids()
        self.found = ObservedHistory(state_of(world), [], begin_us=world.now_us, end_us=world.now_us)
        for request in world.requests.active():
            self._add(_restarted(request, world.pools[request.submitted.pool].model, world.now_us))
        reader.followed.on_applied = self._on_applied

    def _on_applied(self, _: str, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision]) -> None:
        found = self.found
        void = self._voids()
        accepted, self._void = void == self._void, void
        found.begin_us = found.begin_us or now_us
        found.end_us = now_us
        match event:
            case RequestSubmitted() if _is_new(event, decided):
                self._add(_submitted(event, now_us))
            case RequestCancelled() if decided and event.request_id in self._open:
                self._open[event.request_id].cancelled_us = now_us
            case PrefillFinished() | FirstTokenEmitted() | RequestFinished() if accepted:
                self._progress(event, now_us)
            case _ if isinstance(event, PoolSetting):
                found.external_events.append((now_us, event))
            case WorkerJoined() | WorkerSuspect() | WorkerRecovered() | WorkerDraining() | WorkerLost() if accepted:
                found.external_events.append((now_us, event))
            case WorkerCommanded():
                found.commands += 1
            case _:
                pass
        for decision in decided:
            if isinstance(decision, RequestRouted) and decision.request_id in self._open:
                _note_routed(self._open[decision.request_id], decision)

    def _add(self, request: ObservedRequest) -> None:
        self.found.requests.append(request)
        self._open[request.request_id] = request

    def _progress(self, event: PrefillFinished | FirstTokenEmitted | RequestFinished, now_us: int) -> None:
        request = self._open.get(event.request_id)
        match event:
            case _ if request is None:
                pass
            case PrefillFinished():
                request.prefilled_us, request.kept_bytes = now_us, event.prefilled.bytes
                request.cached_tokens, request.onboarded = event.prefilled.cached_tokens, event.onboarded
            case FirstTokenEmitted() if not request.first_us:
                request.first_us = now_us
                request.transferred_bytes, request.transfer_us = event.transferred_bytes, event.transfer_us
                if request.prefiller is None:
                    request.cached_tokens, request.onboarded = event.cached_tokens, event.onboarded
            case RequestFinished():
                request.last_us, request.output_tokens = now_us, event.output_tokens
                del self._open[event.request_id]
            case _:
                pass

    def _voids(self) -> tuple[int, int]:
        counts = self._world.counts
        return counts["stale_progress"], counts["stale_fleet_event"]


async def observe_history(
    log: Log, partition: int, progress: OnProgress | None = None, custom: CustomPolicies = ONLY_BUILT_IN
) -> ObservedHistory:
    """Derive a group from its oldest usable state, and collect the input for the simulator.

    `progress` is called regularly with the number of journal records done, their total, and the decisions verified.
    """
    reader = await read_whole(log, partition, custom)
    found = _HistoryCollector(reader).found
    verified = 0
    async for step in reader:
        found.divergence = step.divergence
        verified += isinstance(step.record, AnyDecision)
        if progress is not None and (step.offset + 1 - reader.start) % PROGRESS_EVERY == 0:
            progress(step.offset + 1, reader.end, verified)
    found.unverified = reader.unverified
    return found


def state_of(world: World) -> list[Chunk]:
    """Return the snapshot chunks of a world without requests, commands and `consumed`, which is not part of a state.

    So the function may be called between two journal records, when `world.consumed` is not empty.
    """
    consumed = list(world.consumed)
    world.consumed.clear()
    chunks: list[Chunk] = [chunk for chunk in world.snapshot() if not isinstance(chunk, REQUEST_CHUNKS)]
    world.consumed.extend(consumed)
    return chunks


def _note_routed(requests: ObservedRequest, routed: RequestRouted) -> None:
    where = routed.worker_id, routed.rank
    if routed.stage == "prefill":
        requests.prefiller, requests.prefills = where, routed.attempt
    elif routed.stage != "encode":
        requests.worker, requests.attempts = where, routed.attempt
        if routed.stage == "aggregated":
            requests.prefiller = None


def _is_new(event: RequestSubmitted, decided: Sequence[AnyDecision]) -> bool:
    """Return whether the owner treated the submission as a new request and not as a duplicate."""
    return any(
        isinstance(one, RequestRouted | RequestHeld | RequestRejected)
        and one.request_id == event.request_id
        and getattr(one, "reason", "") != "duplicate_id"
        for one in decided
    )


def _submitted(event: RequestSubmitted, now_us: int) -> ObservedRequest:
    return ObservedRequest(
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
    )


def _restarted(request: ActiveRequest, model: str, now_us: int) -> ObservedRequest:
    return ObservedRequest(
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
