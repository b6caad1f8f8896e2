"""Prefill and decode apart, lived and simulated: where both put each stage, and a history placed as it was lived."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from forebay.cli.common.recorded_requests import placed_at
from forebay.events.fleet import WorkerJoined, WorkerSpec
from forebay.events.snapshots import Chunk, WorkerState
from forebay.replay.observed import External, Lived
from forebay.simulate.outcome import Served

T = TypeVar("T", WorkerState, WorkerJoined)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of decisions that were the same both times.

    Attributes:
        compared: how many there are.
        equal: in both.
        by_chance: of as many equal ones, if each side gave every worker as many requests as it did, at random.
    """

    compared: int
    equal: float
    by_chance: float


def agreement(pairs: Sequence[tuple[object, object]]) -> Placement:
    """Of some decisions, each lived and simulated; there is one."""
    ours, theirs = (Counter(side) for side in zip(*pairs, strict=True))
    return Placement(
        compared=len(pairs),
        equal=sum(lived == simulated for lived, simulated in pairs) / len(pairs),
        by_chance=sum(count * theirs[worker] for worker, count in ours.items()) / len(pairs) ** 2,
    )


def stages(pairs: Sequence[tuple[Served, Served]]) -> dict[str, Placement]:
    """By what was decided; nothing where no request got so far both times.

    `place` is whether a prompt was computed by who answered. Of those that agree in this, `prefill` is who computed it
    for another, `decode` who answered then, and `aggregated` who did both.
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


def specs(history: Lived) -> Iterator[WorkerSpec]:
    """Of all workers that ever took part in a recording; one that came again comes again."""
    yield from (chunk.spec for chunk in history.state if isinstance(chunk, WorkerState))
    yield from (one.spec for _, one in history.said if isinstance(one, WorkerJoined))


def placeable(history: Lived) -> tuple[Sequence[Chunk], Sequence[tuple[int, External]]]:
    """The same with a taint for each prefill worker, which all decode workers have, so that a request can name one.

    A request names only who answers: what taints it asks for holds of both.
    """
    taints = tuple(dict.fromkeys(placed_at(spec.worker_id) for spec in specs(history) if spec.role == "prefill"))

    def labelled(one: T) -> T:
        return msgspec.structs.replace(one, spec=_labelled(one.spec, taints))

    state = [labelled(one) if isinstance(one, WorkerState) else one for one in history.state]
    said = [(at_us, labelled(one) if isinstance(one, WorkerJoined) else one) for at_us, one in history.said]
    return state, said


def _labelled(spec: WorkerSpec, taints: Iterable[str]) -> WorkerSpec:
    own = {"prefill": (placed_at(spec.worker_id),), "decode": taints}.get(spec.role, ())
    return msgspec.structs.replace(spec, taints=(*spec.taints, *own))
