"""States of the requests of one worker epoch: one record per request, and one table of transitions.

    start --> running, or resuming --submit--> running        running --first token--> responding
    resuming, running, responding --end, cancel--> ended      running --keep--> kept --release, cancel--> ended

Theory of operation. A record describes the latest attempt at a request that started on this worker, and remembers the
earlier attempts. Each transition has a guard, which checks the attempt of the event. An event that the guard rejects is
stale and changes nothing. A later attempt may start in any state.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from forebay.events.decisions import Stage
from forebay.events.transfer import Prefilled
from forebay.workers.engine import PromptPrefilled

ENDED_MAX = 8_192  # 0.9 kB each; minutes of an engine, and a new owner sends only unanswered items again
KEPT_MAX = 1_024  # each result has a descriptor of a few kilobytes; at full speed this many end within seconds

AttemptKey = tuple[int, int, Stage, int]
"""Reply slot, start offset of the response, stage and attempt. A request id may be reused for a later response."""


class WorkState(StrEnum):
    """State of a request on one worker, see the diagram at the top of the module."""

    RESUMING = "resuming"  # the output of earlier attempts is being read
    RUNNING = "running"  # the engine has the request, or its embeddings are being fetched
    RESPONDING = "responding"  # the engine has emitted the first token
    KEPT = "kept"  # the prompt is computed, and the worker keeps its KV for another worker
    ENDED = "ended"


class WorkTransition(StrEnum):
    SUBMIT = "submit"
    FIRST_TOKEN = "first_token"  # noqa: S105 - a token of text
    KEEP = "keep"
    END = "end"
    CANCEL = "cancel"
    RELEASE = "release"


@dataclass(slots=True)
class WorkRequest:
    """Latest attempt at a request that started on this worker. Only `RequestTable` changes its state.

    Attributes:
        owner_epoch: epoch of the owner that sent the attempt most recently. Records of the output contain it.
        reply_slot: partition of the topic `tokens` for the response.
        earlier_tokens: number of output tokens of earlier attempts; the engine gets them as the end of its prompt.
        blocks: number of KV blocks of prompt and output as last reported to the owner; 0 if it needs no reports.
        fetched: descriptor of the KV that the engine fetches; None if there is none, or it is not needed.
        unfetched: whether the item had KV to fetch, but does not need it.
        prefill_attempt: latest prefill attempt that started on this worker; 0 if there was none.
        result: result of the prefill; None unless the state is `kept`.
        kept_until_s: end of the lease of the KV, in seconds of the monotonic clock.
        reply_key: key of the request, which every event of the response must have.
    """

    request_id: str
    attempt: int
    owner_epoch: int
    reply_slot: int
    rank: int = 0
    stage: Stage = "aggregated"
    earlier_tokens: int = 0
    prompt_tokens: int = 0
    blocks: int = 0
    fetched: Prefilled | None = None
    unfetched: bool = False
    state: WorkState = WorkState.RUNNING
    attempts: set[AttemptKey] = field(default_factory=set)
    prefill_attempt: int = 0
    result: PromptPrefilled | None = None
    kept_until_s: float = 0.0
    reply_key: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """Target of a transition. `guard` tells for a record and an event's attempt whether it applies or is stale."""

    target: WorkState
    guard: Callable[[WorkRequest, int], bool]


def _is_same(request: WorkRequest, attempt: int) -> bool:
    return request.attempt == attempt


def _is_not_later(request: WorkRequest, attempt: int) -> bool:
    return request.attempt <= attempt


def _is_latest_prefill(request: WorkRequest, attempt: int) -> bool:
    return request.prefill_attempt <= attempt


def _always(_: WorkRequest, __: int) -> bool:
    return True


_ENDS = {
    WorkTransition.END: Rule(WorkState.ENDED, _is_same),
    WorkTransition.CANCEL: Rule(WorkState.ENDED, _is_not_later),
}
TRANSITIONS: dict[WorkState, dict[WorkTransition, Rule]] = {
    WorkState.RESUMING: {WorkTransition.SUBMIT: Rule(WorkState.RUNNING, _is_same), **_ENDS},
    WorkState.RUNNING: {
        WorkTransition.FIRST_TOKEN: Rule(WorkState.RESPONDING, _is_same),
        WorkTransition.KEEP: Rule(WorkState.KEPT, _is_same),
        **_ENDS,
    },
    WorkState.RESPONDING: _ENDS,
    WorkState.KEPT: {
        WorkTransition.RELEASE: Rule(WorkState.ENDED, _is_latest_prefill),
        WorkTransition.CANCEL: Rule(WorkState.ENDED, _always),
    },
    WorkState.ENDED: {},
}


class RequestTable:
    """Table of the requests of one worker epoch that are in flight, kept for another worker, or ended recently.

    `in_flight` has the records in state `resuming`, `running` or `responding`, by request id.
    """

    def __init__(self) -> None:
        self.in_flight: OrderedDict[str, WorkRequest] = OrderedDict()
        self._kept: OrderedDict[str, WorkRequest] = OrderedDict()
        self._ended: OrderedDict[str, WorkRequest] = OrderedDict()

    def get(self, request_id: str) -> WorkRequest | None:
        return self.in_flight.get(request_id) or self._kept.get(request_id) or self._ended.get(request_id)

    def find(self, request_id: str, attempt: int) -> WorkRequest | None:
        """Return the record of a request if it is in flight and its attempt is `attempt`, otherwise None."""
        request = self.in_flight.get(request_id)
        return request if request is not None and request.attempt == attempt else None

    def start(self, request: WorkRequest, key: AttemptKey, *, resumes: bool) -> bool:
        """Add an attempt, in place of the previous attempt at the same request.

        It begins in state `resuming` or `running`. Return False, without any change, if this attempt already started on
        this worker or a later one is in flight.
        """
        previous = self.get(request.request_id)
        if previous is not None:
            is_superseded = previous.request_id in self.in_flight and previous.attempt > request.attempt
            if is_superseded or key in previous.attempts:
                return False
            request.attempts, request.prefill_attempt = previous.attempts, previous.prefill_attempt
            del self._collection(previous)[request.request_id]
        request.attempts.add(key)
        if request.stage == "prefill":
            request.prefill_attempt = request.attempt
        self._enter(request, WorkState.RESUMING if resumes else WorkState.RUNNING)
        return True

    def move(self, request_id: str, transition: WorkTransition, attempt: int) -> WorkRequest | None:
        """Apply a transition for an event of `attempt`, and return the record of the request.

        Return None, without any change, if the event is stale: the state or the guard does not allow the transition.
        """
        request = self.get(request_id)
        rule = None if request is None else TRANSITIONS[request.state].get(transition)
        if request is None or rule is None or not rule.guard(request, attempt):
            return None
        del self._collection(request)[request_id]
        self._enter(request, rule.target)
        return request

    def _collection(self, request: WorkRequest) -> OrderedDict[str, WorkRequest]:
        match request.state:
            case WorkState.KEPT:
                return self._kept
            case WorkState.ENDED:
                return self._ended
            case _:
                return self.in_flight

    def _enter(self, request: WorkRequest, state: WorkState) -> None:
        request.state = state
        if state is not WorkState.KEPT:
            request.result = None
        self._collection(request)[request.request_id] = request
        if len(self._kept) > KEPT_MAX:
            _, oldest = self._kept.popitem(last=False)
            self._enter(oldest, WorkState.ENDED)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
