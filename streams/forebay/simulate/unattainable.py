"""Why requests miss an SLO while the fleet is nearly idle, so that no request rate can meet it.

Theory of operation. At nearly zero load a request that runs alone on its worker has the lowest latency that this fleet
can offer. If it misses a limit, the cause is its size or the speed of the engines. Requests with equal arrival times
overlap at every speed if they are more than the workers. Each miss has exactly one cause.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from forebay.simulate.outcome import RequestOutcome, SimulationOutcome
from forebay.simulate.slo import US_PER_MS, Slo

Cause = Literal["failed", "shared_arrival", "overlap", "prompt", "itl", "e2e"]


class MissCause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of misses.

    Attributes:
        cause: `failed`; `shared_arrival` if the request overlaps with others of the same arrival time; `overlap` if it
            overlaps with others, for example of the same session; otherwise `prompt` if it misses the limit for TTFT,
            `itl` or `e2e`.
    """

    cause: Cause
    requests: int
    text: str


@dataclass(frozen=True, slots=True)
class _Request:
    """Latencies of a request in milliseconds, and how it relates to the other requests."""

    outcome: RequestOutcome
    sharing: int  # requests with the same arrival time, this one included
    alone: bool

    @property
    def computed_tokens(self) -> int:
        return self.outcome.prompt_tokens - self.outcome.cached_tokens

    @property
    def ttft_ms(self) -> float:
        return (self.outcome.first_us - self.outcome.arrived_us) / US_PER_MS

    @property
    def e2e_ms(self) -> float:
        return (self.outcome.last_us - self.outcome.arrived_us) / US_PER_MS

    @property
    def itl_ms(self) -> float:
        return (self.e2e_ms - self.ttft_ms) / (self.outcome.output_tokens - 1) if self.outcome.output_tokens > 1 else 0

    def misses(self, slo: Slo) -> bool:
        return self.outcome.failure != "" or any(
            limit is not None and value > limit
            for value, limit in ((self.ttft_ms, slo.ttft_ms), (self.itl_ms, slo.itl_ms), (self.e2e_ms, slo.e2e_ms))
        )


def miss_causes(outcome: SimulationOutcome, slo: Slo, profiles: Sequence[str]) -> list[MissCause]:
    """Return the causes of all misses of a run at nearly zero load, most frequent first.

    Args:
        profiles: names of the engine profiles, for the explanations.
    """
    requests = _related(outcome)
    by_cause: dict[Cause, list[_Request]] = {}
    for one in requests:
        if one.misses(slo):
            by_cause.setdefault(_cause(one, slo), []).append(one)
    alone = [one for one in requests if one.alone]
    return [
        MissCause(cause=cause, requests=len(of), text=_text(cause, of, alone, slo, " and ".join(profiles)))
        for cause, of in sorted(by_cause.items(), key=lambda item: -len(item[1]))
    ]


def _related(outcome: SimulationOutcome) -> list[_Request]:
    """Return the requests of a run in order of arrival."""
    requests = sorted(outcome.requests, key=lambda one: one.arrived_us)
    sharing = Counter(one.arrived_us for one in requests)
    by_worker: dict[int, list[RequestOutcome]] = {}
    for one in requests:
        for worker in {one.worker, one.prefiller}:
            if worker is not None:
                by_worker.setdefault(worker, []).append(one)
    overlapping = {id(one) for of in by_worker.values() for one in _overlapping(of)}
    return [_Request(one, sharing[one.arrived_us], id(one) not in overlapping) for one in requests]


def _overlapping(requests: list[RequestOutcome]) -> Iterator[RequestOutcome]:
    """Yield the requests that overlap with another one. `requests` are those of one worker, in order of arrival."""
    latest: RequestOutcome | None = None  # of the previous requests, the one that ended last
    for one in requests:
        if latest is not None and one.arrived_us < latest.last_us:
            yield latest
            yield one
        if latest is None or one.last_us > latest.last_us:
            latest = one


def _cause(one: _Request, slo: Slo) -> Cause:
    if one.outcome.failure:
        return "failed"
    if not one.alone:
        return "shared_arrival" if one.sharing > 1 else "overlap"
    if slo.ttft_ms is not None and one.ttft_ms > slo.ttft_ms:
        return "prompt"
    return "itl" if slo.itl_ms is not None and one.itl_ms > slo.itl_ms else "e2e"


def _text(cause: Cause, missed: list[_Request], alone: list[_Request], slo: Slo, profiles: str) -> str:
    """Return the explanation of a cause. `alone` are all requests that overlap with no other."""
    match cause:
        case "failed":
            return f"failed, the first one because: {missed[0].outcome.failure}"
        case "shared_arrival":
            most = max(one.sharing for one in missed)
            return f"arrive at the same time as others, up to {most} at one time; the speed does not separate them"
        case "overlap":
            return "overlap with other requests, because they depend on the same responses or arrive in bursts"
        case "prompt":
            return " ".join(_prompt_words(missed, alone, slo))
        case "itl":
            itl_ms = statistics.median(one.itl_ms for one in missed)
            text = f"have an ITL above {slo.itl_ms:g} ms, even on an idle worker: {itl_ms:.1f} ms at the median"
            return f"{text}, with the engine profile {profiles}"
        case "e2e":
            best = min(missed, key=lambda one: one.e2e_ms)
            text = f"take longer than {slo.e2e_ms:g} ms, even on an idle worker: the fastest takes {best.e2e_ms:.0f} ms"
            return f"{text} for {best.computed_tokens} uncached tokens and {best.outcome.output_tokens} output tokens"


def _prompt_words(missed: list[_Request], alone: list[_Request], slo: Slo) -> Iterator[str]:
    shortest = min(missed, key=lambda one: one.computed_tokens)
    yield f"have prompts that are too long for a TTFT of {slo.ttft_ms:g} ms, even on an idle worker:"
    yield f"{shortest.computed_tokens} uncached tokens take {shortest.ttft_ms:.4g} ms"
    met = [one for one in alone if slo.ttft_ms is not None and not one.outcome.failure and one.ttft_ms <= slo.ttft_ms]
    if met:
        longest = max(met, key=lambda one: one.computed_tokens)
        yield f"(the longest prompt that meets it has {longest.computed_tokens})"
    else:
        yield "(no request meets it)"
