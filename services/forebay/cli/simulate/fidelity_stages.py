"""Comparison of routing decisions per stage of disaggregated serving, and the recorded placement for a simulation."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from forebay.cli.common.recorded_simulation import placement_taint
from forebay.events.fleet import WorkerJoined, WorkerSpec
from forebay.events.snapshots import Chunk, WorkerState
from forebay.replay.observed import ExternalEvent, ObservedHistory
from forebay.simulate.outcome import RequestOutcome

T = TypeVar("T", WorkerState, WorkerJoined)


class PlacementAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """Agreement between recorded and simulated decisions.

    Attributes:
        equal: share of equal decisions, 0 to 1.
        by_chance: share of equal decisions to expect if recording and simulation each kept their number of requests per
            worker, but assigned the requests at random.
    """

    compared: int
    equal: float
    by_chance: float


def agreement(pairs: Sequence[tuple[object, object]]) -> PlacementAgreement:
    """Return how often the recorded and the simulated decision of a pair are equal. At least one pair is required."""
    ours, theirs = (Counter(side) for side in zip(*pairs, strict=True))
    return PlacementAgreement(
        compared=len(pairs),
        equal=sum(observed == simulated for observed, simulated in pairs) / len(pairs),
        by_chance=sum(count * theirs[worker] for worker, count in ours.items()) / len(pairs) ** 2,
    )


def stages(pairs: Sequence[tuple[RequestOutcome, RequestOutcome]]) -> dict[str, PlacementAgreement]:
    """Return the agreement per kind of decision, from pairs of a recorded and a simulated outcome.

    Returns:
        A dict without the kinds that no pair has. `place` compares whether the prompt was prefilled remotely. If both
        were, `prefill` compares the prefill workers and `decode` the decode workers. If none was, `aggregated` compares
        the workers.
    """
    remote = [pair for pair in pairs if None not in (pair[0].prefiller, pair[1].prefiller)]
    local = [pair for pair in pairs if pair[0].prefiller is pair[1].prefiller is None]
    found: dict[str, list[tuple[object, object]]] = {
        "place": [(ours.prefiller is None, theirs.prefiller is None) for ours, theirs in pairs],
        "prefill": [(ours.prefiller, theirs.prefiller) for ours, theirs in remote],
        "decode": [(ours.worker, theirs.worker) for ours, theirs in remote],
        "aggregated": [(ours.worker, theirs.worker) for ours, theirs in local],
    }
    return {name: agreement(decisions) for name, decisions in found.items() if decisions}


def specs(history: ObservedHistory) -> Iterator[WorkerSpec]:
    """Yield the specs of all workers of a recording. A worker that joined twice occurs twice."""
    yield from (chunk.spec for chunk in history.state if isinstance(chunk, WorkerState))
    yield from (one.spec for _, one in history.external_events if isinstance(one, WorkerJoined))


def placeable(history: ObservedHistory) -> tuple[Sequence[Chunk], Sequence[tuple[int, ExternalEvent]]]:
    """Return state and events of a recording, changed so that a simulated request can demand its prefill worker.

    Each prefill worker gets a taint of its own, and all decode workers get all of these taints. Taints are needed
    because a request can name only its decode worker. The decode workers need them, too, because the taints that a
    request requires apply to both stages.
    """
    taints = tuple(dict.fromkeys(placement_taint(spec.worker_id) for spec in specs(history) if spec.role == "prefill"))

    def labelled(one: T) -> T:
        return msgspec.structs.replace(one, spec=_labelled(one.spec, taints))

    state = [labelled(one) if isinstance(one, WorkerState) else one for one in history.state]
    events = [
        (at_us, labelled(one) if isinstance(one, WorkerJoined) else one) for at_us, one in history.external_events
    ]
    return state, events


def _labelled(spec: WorkerSpec, taints: Iterable[str]) -> WorkerSpec:
    own = {"prefill": (placement_taint(spec.worker_id),), "decode": taints}.get(spec.role, ())
    return msgspec.structs.replace(spec, taints=(*spec.taints, *own))
