"""The parts of a time to first token add up to it, whatever the request went through."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.phases import Phase
from forebay.core.ttft_parts import PARTS, TimeByPart

STEPS = st.lists(st.tuples(st.sampled_from(Phase), st.integers(0, 1_000)), max_size=12)


@given(STEPS, st.integers(0, 1_000), st.integers(0, 2_000))
def test_parts_add_up(steps: list[tuple[Phase, int]], last_us: int, transfer_us: int) -> None:
    times, now_us = TimeByPart(5), 5
    by_phase, here_us = dict.fromkeys(Phase, 0), 0
    for phase, passed_us in steps:
        by_phase[times.phase] += passed_us
        now_us += passed_us
        here_us = here_us + passed_us if phase is times.phase else 0
        times.enter(phase, now_us)
    by_phase[times.phase] += last_us
    parts = times.until(now_us + last_us, transfer_us)
    moved_us = parts.pop("transfer", 0)
    assert moved_us == min(transfer_us, here_us + last_us), "no longer than the phase that it was in"
    parts[PARTS[times.phase]] += moved_us
    expected = {part: sum(us for phase, us in by_phase.items() if PARTS[phase] == part) for part in parts}
    assert parts == expected
    assert sum(parts.values()) == now_us + last_us - 5, "nothing is left out"


def test_disagg_the_end_of_the_last_prefill_is_kept() -> None:
    times = TimeByPart(0)
    assert times.prefilled_us is None
    times.enter(Phase.REMOTE_PREFILL, 10)
    times.enter(Phase.REMOTE_PREFILL, 15)  # by another worker
    times.enter(Phase.TRANSFER, 40)
    assert times.prefilled_us == 40
    times.enter(Phase.REMOTE_PREFILL, 50)
    times.enter(Phase.WAITING, 70)
    times.enter(Phase.TRANSFER, 75)
    assert times.prefilled_us == 70
    assert times.until(100, 5) == {"queue": 10, "prefill": 50, "wait": 5, "decode": 30, "transfer": 5}
