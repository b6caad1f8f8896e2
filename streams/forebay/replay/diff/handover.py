"""What a simulator needs to go on where a comparison forks: both worlds as they were, and what came from outside later.

Kept is one entry for each request that comes after the fork, with the hashes of its blocks: as much as the rest of the
recording holds of prompts. Requests under way at the fork begin anew there, since how far they were is not known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.core.state.active_request import ActiveRequest
from forebay.core.step import AnyDecision, InputEvent
from forebay.core.world import World
from forebay.events.control import BusyThresholdsSet, DisaggregationSet, PoolConfigured
from forebay.events.decisions import RequestHeld, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerJoined, WorkerLost
from forebay.events.progress import FirstTokenEmitted, PrefillFinished, RequestFinished
from forebay.events.requests import RequestCancelled, RequestSubmitted, RoutingHints
from forebay.events.snapshots import Booking, Chunk, CommandState, Remembered, Reported, RequestState

OF_REQUESTS = Booking | CommandState | Remembered | Reported | RequestState


@dataclass(slots=True)
class Asked:
    """A request from the fork on, and what history made of it; times are the owner's clock.

    Attributes:
        under_way: it came before the fork, and begins anew at it.
        worker: the id and the rank that history sent it to last; None for none. `attempts` is how often it was sent.
        first_us: when the router heard of its first token; `last_us` of its end. 0 for never.
        cancelled_us: when its client left; 0 for never.
        output_tokens: how many it gave; None when history did not finish it.
        stamped_us: the wall clock of who submitted it; `first_stamped_us` of the worker at its first token. 0 unknown.
        prefiller: the id and the rank that computed its prompt for `worker`; None where that did so itself, which is
            also who `cached_tokens` are of. `prefills` is how often it was sent to be computed for another.
        prefilled_us: when the router heard that it is computed. Its KV has `kept_bytes` then, of which
            `transferred_bytes` were moved, in `transfer_us` by the clock of who fetched them. 0 where nobody says.
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
    under_way: bool
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


class Requests:
    """Collects requests, and what history makes of them, event by event.

    Attributes:
        asked: in the order in which they came; ids may come twice.
    """

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self._open: dict[str, Asked] = {}

    def begin(self, history: World, event: InputEvent | None, now_us: int) -> None:
        """Take in those under way, but for one that `event` has just brought."""
        new = event.request_id if isinstance(event, RequestSubmitted) else None
        for request in history.requests.active():
            if request.request_id != new:
                self._ask(_again(request, history.pools[request.pool].model, now_us))

    def look(self, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision], *, heard: bool) -> None:
        """An event of history's, and what history decided; `heard` is whether it counted as progress."""
        match event:
            case RequestSubmitted() if _is_new(event, decided):
                self._ask(_first(event, now_us))
            case RequestCancelled() if event.request_id in self._open:
                self._open[event.request_id].cancelled_us = now_us
            case PrefillFinished() if heard and event.request_id in self._open:
                asked, prefilled = self._open[event.request_id], event.prefilled
                asked.prefilled_us, asked.kept_bytes = now_us, prefilled.bytes
                asked.cached_tokens = prefilled.cached_tokens
            case FirstTokenEmitted() | RequestFinished() if heard:
                self._progress(event, now_us)
            case _:
                pass
        for decision in decided:
            if isinstance(decision, RequestRouted) and decision.request_id in self._open:
                _sent(self._open[decision.request_id], decision)

    def _ask(self, asked: Asked) -> None:
        self.asked.append(asked)
        self._open[asked.request_id] = asked

    def _progress(self, event: FirstTokenEmitted | RequestFinished, now_us: int) -> None:
        asked = self._open.get(event.request_id)
        if asked is None:
            return
        if isinstance(event, FirstTokenEmitted):
            if not asked.first_us:
                asked.first_us, asked.first_stamped_us = now_us, event.at_us
                asked.transferred_bytes, asked.transfer_us = event.transferred_bytes, event.transfer_us
                if asked.prefiller is None:
                    asked.cached_tokens = event.cached_tokens
            return
        asked.last_us, asked.output_tokens = now_us, event.output_tokens
        del self._open[event.request_id]


OfOperator = PoolConfigured | BusyThresholdsSet | DisaggregationSet
Said = tuple[int, OfOperator]


@dataclass(slots=True)
class Handover:
    """Collects from the fork on; empty when there is none.

    Attributes:
        at_us: the owner's clock at the fork.
        states: history's world and the alternative's, without their requests, as snapshots tell them.
        said: what operators said, in history and as the alternative has it.
        joined: workers that joined after the fork; `lost` those lost.
    """

    at_us: int = 0
    states: tuple[list[Chunk], list[Chunk]] = field(default_factory=lambda: ([], []))
    said: tuple[list[Said], list[Said]] = field(default_factory=lambda: ([], []))
    joined: int = 0
    lost: int = 0
    _requests: Requests = field(default_factory=Requests)

    @property
    def asked(self) -> list[Asked]:
        """The requests, in the order in which they came; ids may come twice."""
        return self._requests.asked

    def begin(self, history: World, other: World, event: InputEvent | None, now_us: int) -> None:
        """The worlds differ for the first time, by what `event` led to."""
        self.at_us = now_us
        self.states = (state_of(history), state_of(other))
        self._requests.begin(history, event, now_us)

    def look(self, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision], *, heard: bool) -> None:
        """An event of history's, at the fork or later, and what history decided."""
        self._requests.look(event, now_us, decided, heard=heard)
        self.joined += isinstance(event, WorkerJoined)
        self.lost += isinstance(event, WorkerLost)

    def configure(self, events: Sequence[OfOperator], now_us: int) -> None:
        """An operator said something after the fork, in history and in the alternative."""
        for said, event in zip(self.said, events, strict=True):
            said.append((now_us, event))


def state_of(world: World) -> list[Chunk]:
    """All but requests and commands. Between two journal records `consumed` is not empty, and no part of a state."""
    consumed = list(world.consumed)
    world.consumed.clear()
    chunks: list[Chunk] = [chunk for chunk in world.snapshot() if not isinstance(chunk, OF_REQUESTS)]
    world.consumed.extend(consumed)
    return chunks


def _sent(asked: Asked, routed: RequestRouted) -> None:
    """A request goes to a worker."""
    where = routed.worker_id, routed.rank
    if routed.stage == "prefill":
        asked.prefiller, asked.prefills = where, routed.attempt
    elif routed.stage != "encode":
        asked.worker, asked.attempts = where, routed.attempt
        if routed.stage == "aggregated":
            asked.prefiller = None


def _is_new(event: RequestSubmitted, decided: Sequence[AnyDecision]) -> bool:
    """Whether history took it for a request, and not for one that it knew."""
    return any(
        isinstance(one, RequestRouted | RequestHeld | RequestRejected)
        and one.request_id == event.request_id
        and getattr(one, "reason", "") != "duplicate_id"
        for one in decided
    )


def _first(event: RequestSubmitted, now_us: int) -> Asked:
    return Asked(
        event.request_id,
        now_us,
        event.model,
        event.prompt_tokens,
        event.sequence_hashes,
        event.tie_seed,
        event.timeout_us,
        event.routing,
        event.lora_name,
        under_way=False,
        stamped_us=event.at_us,
    )


def _again(request: ActiveRequest, model: str, now_us: int) -> Asked:
    return Asked(
        request.request_id,
        now_us,
        model,
        request.prompt_tokens,
        request.packed,
        request.tie_seed,
        max(1, request.due_us - now_us),
        request.hints,
        request.lora_name,
        under_way=True,
    )
