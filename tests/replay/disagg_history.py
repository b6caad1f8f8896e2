"""A recorded group with prefill and decode workers."""

from forebay.events.control import DisaggConfig, DisaggPolicy, DisaggregationSet
from forebay.events.progress import FirstTokenEmitted, RequestFinished, TransferFailed
from tests.core.disaggregated import prefilled, progress_fields
from tests.core.worlds import PROMPTS, request
from tests.replay.recorder import Recorder, stored

COUNT = 12


def history(policy: DisaggPolicy, *, by_hand: DisaggPolicy | None = None, cached_by: str = "p") -> Recorder:
    """Return a history in which each request finishes before the next one arrives."""
    made = Recorder()
    made.disagg(("p", "q"), ("d", "e"), disagg=DisaggConfig(policy=policy))
    if by_hand is not None:
        made("control", DisaggregationSet(model="m", disagg=DisaggConfig(policy=by_hand)))
    for worker in cached_by:
        stored(made, worker, PROMPTS[0])
    for number in range(COUNT):
        (routed,) = made("requests", request(f"r{number}", PROMPTS[number % 2]))
        if routed.stage == "prefill":
            (routed,) = prefilled(made, routed)
        if number == 3 and routed.stage == "decode":
            _, routed = made("progress", TransferFailed(**progress_fields(routed), error="lost"))
            (routed,) = prefilled(made, routed)
        made("progress", FirstTokenEmitted(**progress_fields(routed)))
        made("progress", RequestFinished(**progress_fields(routed), finish_reason="stop", output_tokens=2))
    made.seal()
    return made
