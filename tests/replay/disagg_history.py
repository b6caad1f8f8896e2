"""A recorded group with prefill and decode workers."""

from forebay.events.control import DisaggConfig, DisaggPolicy, DisaggregationSet
from forebay.events.progress import FirstTokenEmitted, TransferFailed
from tests.core.worlds import PROMPTS, request
from tests.replay.recorder import Recorder

COUNT = 12


def history(policy: DisaggPolicy, *, by_hand: DisaggPolicy | None = None, cached_by: str = "p") -> Recorder:
    """Return a history in which each request finishes before the next one arrives."""
    made = Recorder()
    made.disagg(("p", "q"), ("d", "e"), disagg=DisaggConfig(policy=policy))
    if by_hand is not None:
        made("control", DisaggregationSet(model="m", disagg=DisaggConfig(policy=by_hand)))
    for worker in cached_by:
        made.stored(worker, PROMPTS[0])
    for number in range(COUNT):
        (routed,) = made("requests", request(f"r{number}", PROMPTS[number % 2]))
        if routed.stage == "prefill":
            (routed,) = made.prefilled(routed)
        if number == 3 and routed.stage == "decode":
            _, routed = made.emit(TransferFailed, routed, error="lost")
            (routed,) = made.prefilled(routed)
        made.emit(FirstTokenEmitted, routed)
        made.finish(routed, output_tokens=2)
    made.seal()
    return made
