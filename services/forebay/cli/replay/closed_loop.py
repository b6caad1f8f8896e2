"""`forebay replay diff --closed-loop`: simulate the recorded and the alternative policy from the fork on.

The fork is the first event after which the recorded history and the alternative differ. The recorded policy is
simulated, too: the difference between its simulation and the recording is the simulator's error. A smaller difference
between the two simulations is not significant.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from forebay.cli.common.recorded_simulation import RecordedSimulation
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.events.snapshots import WorkerState
from forebay.ingress.errors import Unusable
from forebay.replay.diff.handover import Handover
from forebay.simulate.resumed import rank_keys
from forebay.simulate.transfer_fit import TransferFit

RECORDED, HISTORY, ALTERNATIVE = "history, recorded", "history, simulated", "alternative, simulated"

OnRun = Callable[[str, int, int], None]


class ClosedLoop(msgspec.Struct, kw_only=True):
    """Metrics of three runs after the fork: history as recorded, history simulated, and the alternative simulated.

    Attributes:
        after_s: seconds from the fork to the end of the recording.
        requests: number of requests that arrived after the fork and finished in the recording. The metrics cover these
            requests.
        in_flight: number of requests in flight at the fork. Both simulations restart them there; the metrics exclude
            them.
        assumed: number of requests that did not finish in the recording. Their responses are assumed to have the median
            length.
        speedup: factor by which the simulated engines are faster than the modelled GPU.
        runs: metrics by name of the run, as `forebay simulate` prints them.
        notes: sentences for the user that explain the metrics.
    """

    after_s: float
    requests: int
    in_flight: int
    assumed: int
    speedup: float
    runs: dict[str, dict[str, Any]]
    notes: list[str]


def closed_loop(
    handover: Handover, end_us: int, speedup: float, progress: OnRun, custom: CustomPolicies = ONLY_BUILT_IN
) -> ClosedLoop:
    """Simulate the recorded and the alternative policy from the fork on, and return the metrics.

    Args:
        handover: state of history and of the alternative at the fork, and the external events after it.
        end_us: time of the end of the recording, on the owner's clock.
        speedup: factor by which the simulated engines are faster than the modelled GPU.
        progress: called with the name of the run, the number of requests that have arrived, and the number of all
            requests.
        custom: custom policies that the simulations may run.

    Raises:
        Unusable: the recording after the fork cannot be simulated.
    """
    workers = [chunk.spec for chunk in handover.states[0] if isinstance(chunk, WorkerState)]
    try:
        simulation = RecordedSimulation.of(handover.requests, rank_keys(handover.states[0]), workers)
    except Unusable as error:
        raise Unusable(f"--closed-loop: after the fork, {error}") from None
    requests, compared = simulation.requests, simulation.observed()
    runs = {RECORDED: simulation.summarize(compared.values())}
    for name, state, operator_events in zip(
        (HISTORY, ALTERNATIVE), handover.states, handover.operator_events, strict=True
    ):

        def on_arrived(done: int, run: str = name) -> None:
            progress(run, done, len(requests.by_id))

        try:
            arrivals = requests.arrivals(operator_events)
            resumed = simulation.run(state, arrivals, on_arrived, speedup=speedup, custom=custom)
        except Unusable as error:
            raise Unusable(f"--closed-loop: {error}") from None
        runs[name] = simulation.summarize((resumed.served[request_id] for request_id in compared), resumed.digest)
    return ClosedLoop(
        after_s=(end_us - handover.at_us) / 1e6,
        requests=len(compared),
        in_flight=sum(one.in_flight for one in handover.requests),
        assumed=requests.assumed,
        speedup=speedup,
        runs=runs,
        notes=_notes(handover, len(compared), requests.assumed, speedup, simulation.fit),
    )


def _notes(handover: Handover, compared: int, assumed: int, speedup: float, fit: TransferFit | None) -> list[str]:
    again = sum(one.in_flight for one in handover.requests)
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
