"""`forebay replay diff --closed-loop`: simulate both policies from the fork of a comparison on.

History's policy is simulated, too. The difference between its simulation and its recording is the simulator's error. A
smaller difference between the two simulations is not significant.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from forebay.cli.common.recorded_requests import RecordedRequests, answered, transfers_of
from forebay.core.state.holder_bits import HolderKey
from forebay.events.snapshots import WorkerState
from forebay.ingress.errors import Unusable
from forebay.replay.diff.handover import Handover, RecordedRequest
from forebay.simulate.outcome import RequestOutcomes, SimulationOutcome, summary
from forebay.simulate.resumed import NotSimulable, rank_keys, resume
from forebay.simulate.settings import Transfer
from forebay.simulate.transfer_fit import TransferFit

RECORDED, HISTORY, ALTERNATIVE = "history, recorded", "history, simulated", "alternative, simulated"

OnRun = Callable[[str, int, int], None]


class ClosedLoop(msgspec.Struct, kw_only=True):
    """History as recorded, and both policies simulated from the fork on.

    Attributes:
        after_s: seconds from the fork to the end of the recording.
        requests: requests that arrived after the fork and that history finished. The statistics cover these requests.
        under_way: requests active at the fork. They restart there and are not part of the statistics.
        assumed: requests that history did not finish. Their responses are assumed to have the median length.
        speedup: factor by which engines are faster than the modelled GPU.
        runs: statistics by name of the run, as `forebay simulate` prints them.
        notes: what the statistics mean, in sentences.
    """

    after_s: float
    requests: int
    under_way: int
    assumed: int
    speedup: float
    runs: dict[str, dict[str, Any]]
    notes: list[str]


def closed_loop(handover: Handover, end_us: int, speedup: float, progress: OnRun) -> ClosedLoop:
    """Simulate both policies from the fork on.

    Args:
        handover: the state of both worlds at the fork, and the later events.
        end_us: the owner's clock at the end of the recording.
        speedup: factor by which engines are faster than the modelled GPU.
        progress: called with the name of the run, the number of requests that arrived, and their total.

    Raises:
        Unusable: the rest of the recording cannot be simulated.
    """
    try:
        requests = RecordedRequests(handover.requests)
    except Unusable as error:
        raise Unusable(f"--closed-loop: after the fork, {error}") from None
    compared = requests.comparable
    keys = rank_keys(handover.states[0])
    workers = [chunk.spec for chunk in handover.states[0] if isinstance(chunk, WorkerState)]
    prefilling = {spec.worker_id for spec in workers if spec.role == "prefill"}
    prefill_workers = tuple(number for number, key in enumerate(keys) if key[0] in prefilling)
    fit = transfers_of(handover.requests, workers)
    transfer = Transfer() if fit is None else fit.transfer
    runs = {RECORDED: _recorded(compared.values(), keys, prefill_workers)}
    for name, state, operator_events in zip(
        (HISTORY, ALTERNATIVE), handover.states, handover.operator_events, strict=True
    ):

        def on_arrived(done: int, run: str = name) -> None:
            progress(run, done, len(requests.asked))

        try:
            resumed = resume(state, requests.arrivals(operator_events), on_arrived, speedup=speedup, transfer=transfer)
        except NotSimulable as error:
            raise Unusable(f"--closed-loop: {error}") from None
        served = RequestOutcomes(resumed.served[request_id] for request_id in compared)
        outcome = SimulationOutcome(served, resumed.digest, prefill_workers=prefill_workers)
        runs[name] = summary(outcome, len(keys))
    return ClosedLoop(
        after_s=(end_us - handover.at_us) / 1e6,
        requests=len(compared),
        under_way=sum(one.under_way for one in handover.requests),
        assumed=requests.assumed,
        speedup=speedup,
        runs=runs,
        notes=_notes(handover, len(compared), requests.assumed, speedup, fit),
    )


def _recorded(
    requests: Iterable[RecordedRequest], keys: Sequence[HolderKey], prefill_workers: tuple[int, ...]
) -> dict[str, Any]:
    """Return the statistics of history as its workers reported them. Some workers may have joined after the fork."""
    places = {key: number for number, key in enumerate(keys)}
    served = []
    for one in requests:
        for worker in (one.worker, one.prefiller):
            if worker is not None:
                places.setdefault(worker, len(places))
        served.append(answered(one, places))
    return summary(SimulationOutcome(RequestOutcomes(served), prefill_workers=prefill_workers), len(places))


def _notes(handover: Handover, compared: int, assumed: int, speedup: float, fit: TransferFit | None) -> list[str]:
    again = sum(one.under_way for one in handover.requests)
    lines = [
        f"Statistics cover the {compared:,} requests that arrived after the fork and that history finished, with the "
        "arrival times, prompts and output lengths of the recording.",
        "The difference between history as recorded and history simulated is the simulator's error. A smaller "
        "difference between the two simulations is not significant.",
        "Both simulations begin with the caches of the index at the fork, in the index's order, because the last use "
        f"of a block is not known. Requests active at the fork restart there: {again:,}.",
        "Engines use the mock engine's model"
        + ("." if speedup == 1.0 else f", {speedup:g} times as fast as the modelled GPU."),
    ]
    if fit is not None:
        lines.append(f"KV transfer times are fitted to the recording: {fit}.")
    if handover.joined or handover.lost:
        lines.append(
            f"The fleet stays as it was at the fork. Both simulations ignore that {handover.joined} workers joined and "
            f"{handover.lost} were lost later."
        )
    if assumed:
        lines.append(
            f"{assumed:,} requests that history did not finish are simulated with responses of the median length."
        )
    return lines
