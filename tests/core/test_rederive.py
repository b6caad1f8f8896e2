"""What following a journal knows beside whether it holds; the divergences themselves are in `test_world`."""

import msgspec

from forebay.core.rederive import CLOCK_US_MAX, Rederivation
from forebay.core.world import World
from forebay.events.base import hex_digest
from forebay.events.decisions import ConsumedRun, OwnerClaimed, RequestRouted
from forebay.events.fleet import WorkerLost
from tests.core.recorded import Recorded
from tests.core.worlds import PROMPTS, Driver, joined, request


def test_the_number_of_the_next_record_is_known_before_it_is_applied() -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r1", PROMPTS[0]))
    drive("requests", request("r2", PROMPTS[0]))
    drive("fleet", WorkerLost(owner_epoch=0, worker_id="a", worker_epoch=drive.epoch("a")))
    drive("fleet", joined("b"))
    followed, recorded = Rederivation(World()), Recorded(drive.applied)
    claimed = OwnerClaimed(owner_id="o", core_version=1)
    for offset, record in enumerate([claimed, *drive.decided]):
        later = drive.decided[offset:]
        assert followed.missing_before(offset, record) is None
        assert record is claimed or all(followed.missing_before(offset, one) is not None for one in later)
        assert record is claimed or followed.next_seq == record.seq
        followed.apply(offset, record, recorded.events_of(record))


def test_a_clock_reading_that_is_none() -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r1", PROMPTS[0]))
    [decided] = drive.decided
    *runs, last = decided.consumed
    late = msgspec.structs.replace(decided, consumed=(*runs, ConsumedRun(topic=last.topic, count=1, now_us=1 << 63)))
    found = Rederivation(World()).apply(1, late, Recorded(drive.applied).events_of(late))
    assert found is not None
    assert (found.reason, found.derived) == (f"the clock reading is above {CLOCK_US_MAX}", None)


def test_on_plan_is_called_before_booking() -> None:
    drive = Driver().fleet("a", "b")
    seen: list[tuple[str, str, int]] = []
    drive.world.on_plan = lambda plan: seen.append(
        (plan.request.request_id, hex_digest(plan.table.digest()), len(drive.world.requests))
    )
    for name in ("r1", "r2"):
        drive("requests", request(name, PROMPTS[0]))
    routed = [one for one in drive.decided if isinstance(one, RequestRouted)]
    assert seen == [(one.request_id, one.table_digest, at) for at, one in enumerate(routed)]
    assert len(routed) == 2
