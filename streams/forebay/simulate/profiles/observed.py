"""Recorded runs of single engines, and the same requests in the engine model."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from forebay.engine_model.model import EngineConfig, EngineModel, EngineRequest, EngineStep, RequestRefused
from forebay.engine_model.timing import EngineTiming
from forebay.events.base import U32_BYTES

FOREVER_US = 1 << 62  # no further arrivals: the engine may run until its next event


@dataclass(slots=True)
class ObservedRequest:
    """Recorded request with the times at which its engine processed it. All times are microseconds of one clock.

    Attributes:
        routed_us: when the router sent the request to the engine.
        prompt_tokens: number of tokens of the prompt.
        sequence_hashes: packed sequence hashes of the full blocks of the prompt.
        output_tokens: number of tokens of the response, or the requested maximum if the end was not recorded.
        cached_tokens: prompt tokens that the engine found in its cache; None if unknown.
        first_us: time of the first output token; 0 if there was none.
        last_us: time of the last output token; 0 if there was none.
        stopped_us: time at which the request was cancelled or failed; 0 if it was not.
        left_out: reason why the times of the request must not be compared with the model; empty if they may.
    """

    routed_us: int
    prompt_tokens: int
    sequence_hashes: bytes
    output_tokens: int
    cached_tokens: int | None = None
    first_us: int = 0
    last_us: int = 0
    stopped_us: int = 0
    left_out: str = ""


@dataclass(slots=True)
class EngineRun:
    """Recorded requests of one worker rank during one worker epoch.

    Attributes:
        warm: sequence hashes of the blocks in the cache at the start.
        requests: requests of the rank, in the order in which the router sent them.
    """

    name: str
    config: EngineConfig
    warm: Sequence[int] = ()
    requests: list[ObservedRequest] = field(default_factory=list)


class ModelledTimes(NamedTuple):
    """Times of a recorded request when the engine model runs it.

    Attributes:
        ttft_us: from routing to the first token, in microseconds.
        itl_us: (last token - first token) / (output tokens - 1), in microseconds; 0 for one token.
        cached_tokens: prompt tokens found in the modelled cache.
    """

    ttft_us: float
    itl_us: float
    cached_tokens: int


def remove_rejected(run: EngineRun) -> list[str]:
    """Remove the requests that the engine model rejects from `run`. Return the reason for each removed request."""
    model = EngineModel(run.config)
    taken, reasons = [], []
    for number, one in enumerate(run.requests):
        try:
            model.submit(_request(number, one))
        except RequestRefused as refusal:
            reasons.append(f"the engine model rejects it: {refusal}")
        else:
            model.cancel(str(number))
            taken.append(one)
    run.requests = taken
    return reasons


class ModelledRun:
    """Runs the recorded requests of one engine in the engine model. Iterate over an instance only once."""

    def __init__(self, run: EngineRun, timing: EngineTiming, work_us: int = 0) -> None:
        """Prepare a run.

        Args:
            run: the recorded run. The model must accept all of its requests.
            work_us: microseconds from the router's decision to the engine. They are part of TTFT.
        """
        self._model = EngineModel(structs.replace(run.config, vocabulary=None, timing=timing))
        self._model.warm(run.warm)
        self._requests = run.requests
        self._work_us = work_us
        self._wanted = sum(not one.left_out for one in run.requests)
        self._first: dict[str, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[tuple[ObservedRequest, ModelledTimes]]:
        """Yield every compared request with its modelled times, in the order in which the requests end in the model."""
        events = deque(sorted(self._events()))
        now_us = 0
        while self._wanted:
            while events and events[0][0] <= now_us:
                self._apply_event(*events.popleft()[1:])
            next_us = events[0][0] if events else FOREVER_US
            step = self._model.step(next_us - now_us)
            if step is not None:
                now_us += step.duration_us
                yield from self._ended(step, now_us)
            else:
                assert events, "the compared requests end"
                now_us = next_us

    def _events(self) -> Iterator[tuple[int, int, bool]]:
        """Yield the time, the number and the kind of each event: arrival (False) or cancellation (True)."""
        for number, one in enumerate(self._requests):
            yield one.routed_us + self._work_us, number, False
            if one.stopped_us:
                yield one.stopped_us + self._work_us, number, True

    def _apply_event(self, number: int, stops: bool) -> None:
        one = self._requests[number]
        if stops:
            self._model.cancel(str(number))
            return
        self._model.submit(_request(number, one))

    def _ended(self, step: EngineStep, now_us: int) -> Iterator[tuple[ObservedRequest, ModelledTimes]]:
        for first in step.first_tokens:
            self._first[first.request_id] = (now_us, first.cached_tokens)
        for end in step.finished:
            one = self._requests[int(end.request_id)]
            first_us, cached_tokens = self._first.pop(end.request_id)
            if not one.left_out:
                self._wanted -= 1
                itl_us = (now_us - first_us) / max(1, end.output_tokens - 1)
                yield one, ModelledTimes(first_us - one.routed_us, itl_us, cached_tokens)


def _request(number: int, one: ObservedRequest) -> EngineRequest:
    return EngineRequest(
        request_id=str(number),
        attempt=1,
        token_ids=bytes(one.prompt_tokens * U32_BYTES),
        sequence_hashes=one.sequence_hashes,
        token_seed=number,
        max_tokens=one.output_tokens,
    )
