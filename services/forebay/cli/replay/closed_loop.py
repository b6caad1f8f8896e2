"""`forebay replay diff --closed-loop`: what a comparison hands over at its fork, played by the simulator.

Both policies are simulated, history's too: what its simulation and its recording differ by is the simulator's own
error, and a difference between the two simulations that is smaller says nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from forebay.cli.common.recorded_requests import RecordedRequests, answered, transfers_of
from forebay.core.state.holder_bits import HolderKey
from forebay.events.snapshots import WorkerState
from forebay.ingress.errors import Unusable
from forebay.replay.diff.handover import Asked, Handover
from forebay.simulate.outcome import RequestOutcomes, SimulationOutcome, summary
from forebay.simulate.resumed import NotSimulable, rank_keys, resume
from forebay.simulate.settings import Transfer
from forebay.simulate.transfer_fit import TransferFit

RECORDED, HISTORY, ALTERNATIVE = "history, recorded", "history, simulated", "alternative, simulated"

OnRun = Callable[[str, int, int], None]


class ClosedLoop(msgspec.Struct, kw_only=True):
    """History as recorded, and both policies simulated from the fork on.

    Attributes:
        after_s: from the fork to the end of the recording.
        requests: that history finished, of those that came after the fork: the figures are of these.
        under_way: requests under way at the fork, which begin anew at it and are in no figure.
        assumed: requests that history did not finish; their answers are taken to be as long as the others' median.
        speedup: how much faster than their model the engines are taken to be.
        runs: by name, the figures as `forebay simulate` prints them.
        notes: what these mean, for people.
    """

    after_s: float
    requests: int
    under_way: int
    assumed: int
    speedup: float
    runs: dict[str, dict[str, Any]]
    notes: list[str]


def closed_loop(handover: Handover, end_us: int, speedup: float, progress: OnRun) -> ClosedLoop:
    """Simulate both from the fork on; `end_us` is the owner's clock at the end of the recording.

    `progress` is called with the name of the run, the requests that arrived and their total. Raises Unusable.
    """
    try:
        requests = RecordedRequests(handover.asked)
    except Unusable as error:
        raise Unusable(f"--closed-loop: after the fork, {error}") from None
    compared = requests.comparable
    keys = rank_keys(handover.states[0])
    workers = [chunk.spec for chunk in handover.states[0] if isinstance(chunk, WorkerState)]
    prefilling = {spec.worker_id for spec in workers if spec.role == "prefill"}
    prefill_workers = tuple(number for number, key in enumerate(keys) if key[0] in prefilling)
    fit = transfers_of(handover.asked, workers)
    transfer = Transfer() if fit is None else fit.transfer
    runs = {RECORDED: _recorded(compared.values(), keys, prefill_workers)}
    for name, state, said in zip((HISTORY, ALTERNATIVE), handover.states, handover.said, strict=True):

        def on_arrived(done: int, run: str = name) -> None:
            progress(run, done, len(requests.asked))

        try:
            resumed = resume(state, requests.arrivals(said), on_arrived, speedup=speedup, transfer=transfer)
        except NotSimulable as error:
            raise Unusable(f"--closed-loop: {error}") from None
        served = RequestOutcomes(resumed.served[request_id] for request_id in compared)
        outcome = SimulationOutcome(served, resumed.digest, prefill_workers=prefill_workers)
        runs[name] = summary(outcome, len(keys))
    return ClosedLoop(
        after_s=(end_us - handover.at_us) / 1e6,
        requests=len(compared),
        under_way=sum(one.under_way for one in handover.asked),
        assumed=requests.assumed,
        speedup=speedup,
        runs=runs,
        notes=_notes(handover, len(compared), requests.assumed, speedup, fit),
    )


def _recorded(asked: Iterable[Asked], keys: Sequence[HolderKey], prefill_workers: tuple[int, ...]) -> dict[str, Any]:
    """The figures of history as its workers told them; some may have joined after the fork."""
    places = {key: number for number, key in enumerate(keys)}
    served = []
    for one in asked:
        for worker in (one.worker, one.prefiller):
            if worker is not None:
                places.setdefault(worker, len(places))
        served.append(answered(one, places))
    return summary(SimulationOutcome(RequestOutcomes(served), prefill_workers=prefill_workers), len(places))


def _notes(handover: Handover, compared: int, assumed: int, speedup: float, fit: TransferFit | None) -> list[str]:
    again = sum(one.under_way for one in handover.asked)
    said = [
        f"Figures are of the {compared:,} requests that came after the fork and that history finished, with the "
        "arrival times, prompts and output lengths of the recording.",
        "The difference between history as recorded and history simulated is the simulator's own error: a smaller one "
        "between the two simulations says nothing.",
        "Both simulations begin with the caches as the index had them at the fork, in the index's order, because how "
        f"recently a block was used is not known. Requests under way begin anew there: {again:,}.",
        "Engines are the mock engine's model" + ("." if speedup == 1.0 else f", {speedup:g} times as fast as its GPU."),
    ]
    if fit is not None:
        said.append(f"How KV moves is taken from the recording: {fit}.")
    if handover.joined or handover.lost:
        said.append(
            f"The fleet stays as it was at the fork: that {handover.joined} workers joined and {handover.lost} were "
            "lost later is left out of both simulations."
        )
    if assumed:
        said.append(
            f"{assumed:,} requests that history did not finish are simulated with answers of the median length."
        )
    return said
