"""The recorded clock starts at the larger of the machine's clock and the last reading, and advances steadily."""

import pytest

from forebay import runtime
from forebay.events.decisions import RequestAborted
from forebay.live.owner.owner import RunClock, steady_clock
from forebay.transport.sqlite.log import SqliteLog
from tests.harness.fake_runtime import FakeRuntime
from tests.live.shared import samples
from tests.system import System, submitted, until

NOON_US = 1_000_000_000_000
HOUR_US = 3_600_000_000


class ManualClock:
    def __init__(self, now_us: int) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        return self.now_us


@pytest.mark.parametrize(("recorded_us", "starts_us"), [(NOON_US + 7, NOON_US + 7), (NOON_US - 7, NOON_US)])
def test_the_clock_starts_at_the_larger_reading_and_advances_at_once(recorded_us: int, starts_us: int) -> None:
    hands = ManualClock(NOON_US)
    clock = RunClock(hands)
    clock.resume(recorded_us)
    assert clock.now_us() == starts_us
    hands.now_us += 5
    assert clock.now_us() == starts_us + 5
    hands.now_us -= 3
    assert clock.now_us() == starts_us + 5


def test_steps_of_the_wall_clock_change_nothing() -> None:
    clock = steady_clock()
    before = clock()
    with runtime.use(FakeRuntime(wall_shift_s=-1e6)):
        assert before <= clock() < before + HOUR_US


@pytest.mark.parametrize("skew_us", [HOUR_US, -HOUR_US, 0])
async def test_deadlines_expire_after_a_takeover_between_differing_clocks(
    log: SqliteLog, skew_us: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Deadlines expire under the second owner whether the first owner's clock was ahead, behind or correct."""
    async with System(log).started(workers=0) as system:
        system.start_worker("slow", speedup=0.01)
        async with system.owned(clock_us=ManualClock(NOON_US + skew_us), fleet=1) as first:
            pass
        recorded_us = first.world.now_us
        hands = ManualClock(NOON_US)
        async with system.owned(clock_us=hands) as second:
            system.send(submitted("a", list(range(12)), timeout_us=20_000))
            await until(lambda: len(second.world.requests) == 1)
            assert second.world.now_us == max(NOON_US, recorded_us)
            hands.now_us += 20_000
            await until(lambda: "a" in system.ends())
            (aborted,) = system.decisions(RequestAborted)
            assert aborted.reason == "deadline"
            assert second.world.now_us == max(NOON_US, recorded_us) + 20_000
            assert second.clock_ahead_us == max(0, skew_us)
            assert ("3600.0 s ahead" in caplog.text) == (skew_us > 0)
            assert samples(second)["forebay_owner_clock_ahead_seconds",] == max(0, skew_us) / 1e6
