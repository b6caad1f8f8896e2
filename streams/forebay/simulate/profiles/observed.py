"""What one engine did, as it was recorded, and the same requests run by the engine model."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from forebay.engine_model.model import EngineConfig, EngineModel, EngineRequest, EngineStep, RequestRefused
from forebay.engine_model.timing import EngineTiming
from forebay.events.base import U32_BYTES

FOREVER_US = 1 << 62  # nothing comes any more: an engine may run until it has something to say


@dataclass(slots=True)
class Observed:
    """A request as its engine had it; times in microseconds of one clock.

    Attributes:
        routed_us: when it was sent to the engine.
        output_tokens: of its answer; what was asked for where the end is not known.
        cached_tokens: of its prompt, that the engine found in its cache; None where it never said.
        first_us: its first token; `last_us` its last one. 0 for never.
        stopped_us: when it was cancelled or failed; 0 for never.
        left_out: why its times are not to be compared; empty when they are.
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
    """One rank of one life of a worker: its sizes, what its cache began with, and its requests as they were sent."""

    name: str
    config: EngineConfig
    warm: Sequence[int] = ()
    requests: list[Observed] = field(default_factory=list)


class Modelled(NamedTuple):
    """The same request in the model; `itl_us` is (last token - first) / (output tokens - 1), 0 for one token."""

    ttft_us: float
    itl_us: float
    cached_tokens: int


def take_out_refused(run: EngineRun) -> list[str]:
    """Requests that the engine model does not take are no part of the run any more; why not, for each."""
    model = EngineModel(run.config)
    taken, reasons = [], []
    for number, one in enumerate(run.requests):
        try:
            model.submit(_request(number, one))
        except RequestRefused as refusal:
            reasons.append(f"the engine model refuses it: {refusal}")
        else:
            model.cancel(str(number))
            taken.append(one)
    run.requests = taken
    return reasons


class ModelledRun:
    """An engine run in the model. Use once."""

    def __init__(self, run: EngineRun, timing: EngineTiming, work_us: int = 0) -> None:
        """Requests come to the engine `work_us` after they were sent, and that is a part of TTFT."""
        self._model = EngineModel(structs.replace(run.config, vocabulary=None, timing=timing))
        self._model.warm(run.warm)
        self._requests = run.requests
        self._work_us = work_us
        self._wanted = sum(not one.left_out for one in run.requests)
        self._first: dict[str, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[tuple[Observed, Modelled]]:
        """Every request that is to be compared, as it ends; the model must not refuse any."""
        happenings = deque(sorted(self._happenings()))
        now_us = 0
        while self._wanted:
            while happenings and happenings[0][0] <= now_us:
                self._happen(*happenings.popleft()[1:])
            next_us = happenings[0][0] if happenings else FOREVER_US
            step = self._model.step(next_us - now_us)
            if step is not None:
                now_us += step.duration_us
                yield from self._ended(step, now_us)
            else:
                assert happenings, "those that are wanted end"
                now_us = next_us

    def _happenings(self) -> Iterator[tuple[int, int, bool]]:
        """When each request comes, or is given up."""
        for number, one in enumerate(self._requests):
            yield one.routed_us + self._work_us, number, False
            if one.stopped_us:
                yield one.stopped_us + self._work_us, number, True

    def _happen(self, number: int, stops: bool) -> None:
        one = self._requests[number]
        if stops:
            self._model.cancel(str(number))
            return
        self._model.submit(_request(number, one))

    def _ended(self, step: EngineStep, now_us: int) -> Iterator[tuple[Observed, Modelled]]:
        for first in step.first_tokens:
            self._first[first.request_id] = (now_us, first.cached_tokens)
        for end in step.finished:
            one = self._requests[int(end.request_id)]
            first_us, cached_tokens = self._first.pop(end.request_id)
            if not one.left_out:
                self._wanted -= 1
                itl_us = (now_us - first_us) / max(1, end.output_tokens - 1)
                yield one, Modelled(first_us - one.routed_us, itl_us, cached_tokens)


def _request(number: int, one: Observed) -> EngineRequest:
    return EngineRequest(
        request_id=str(number),
        attempt=1,
        token_ids=bytes(one.prompt_tokens * U32_BYTES),
        sequence_hashes=one.sequence_hashes,
        token_seed=number,
        max_tokens=one.output_tokens,
    )
