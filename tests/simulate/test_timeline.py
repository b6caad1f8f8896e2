"""Timeline bins keep every event when they double, and hold the state at their end."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.model import EngineLoad, EngineModel
from forebay.simulate.outcome import UtilizationTimeline
from forebay.simulate.rank import EngineRank
from forebay.simulate.settings import engine_config, policy
from forebay.simulate.simulation import Simulation
from forebay.simulate.timeline import BINS_MAX, FIRST_BIN_US, Recorder
from tests.core.worlds import spec
from tests.simulate.fleets import Turns, fleet, turn

S = 1_000_000


def ranks(count: int) -> list[EngineRank]:
    return [EngineRank(number, spec(f"w{number}"), 0, 0, EngineModel(engine_config())) for number in range(count)]


@given(gaps=st.lists(st.sampled_from([0, 3_000, 9_999, 10_000, 77_000, 5 * S, 300 * S]), max_size=120))
def test_bins_match_the_list_of_all_events(gaps: list[int]) -> None:
    recorder, [rank] = Recorder(), ranks(1)
    now_us = 0
    events: list[int] = []
    for number, gap_us in enumerate(gaps):
        now_us += gap_us
        if now_us >= recorder.end_us:
            recorder.advance(now_us, len(events), 1, {0: rank})
        recorder.arrived += 1
        recorder.finished += number % 2
        recorder.count_prompt(0, number + 10, number)
        events.append(now_us)
        rank.load = EngineLoad(len(events), 0, 0, 1)
    found: UtilizationTimeline = recorder.end(len(events), 1, {0: rank})
    width = found.bin_us
    assert width % FIRST_BIN_US == 0
    assert len(found.arrived) == now_us // width + 1 <= BINS_MAX
    assert now_us >= BINS_MAX // 2 * width or width == FIRST_BIN_US
    places = [at_us // width for at_us in events]
    bins = range(len(found.arrived))
    assert found.arrived == [places.count(at) for at in bins]
    assert found.finished == [sum(number % 2 for number, place in enumerate(places) if place == at) for at in bins]
    assert found.prompt_tokens == [sum(n + 10 for n, place in enumerate(places) if place == at) for at in bins]
    assert found.cached_tokens == [sum(number for number, place in enumerate(places) if place == at) for at in bins]
    assert found.computed == [[10 * count for count in found.arrived]]
    so_far = [sum(place <= at for place in places) for at in bins]
    assert (found.queued, found.running) == (so_far, [so_far])


def test_a_worker_is_idle_before_it_joins() -> None:
    recorder, both = Recorder(), ranks(2)
    recorder.advance(3 * FIRST_BIN_US, 0, 1, {0: both[0]})
    recorder.count_prompt(1, 5, 2)
    found = recorder.end(0, 2, dict(enumerate(both)))
    assert (found.computed, found.workers) == ([[0, 0, 0, 0], [0, 0, 0, 3]], [1, 1, 1, 2])


def test_timeline_of_a_run_shows_running_and_waiting_requests() -> None:
    turns = [turn(number, 6_400, 1_000, block_ids=tuple(range(100))) for number in range(4)]
    system = fleet(1, sizes={"max_num_seqs": 2})
    found = Simulation(system, policy("kv")).run(Turns(*turns), lambda _: None).timeline
    assert (sum(found.arrived), sum(found.finished)) == (4, 4)
    assert sum(found.prompt_tokens) == 4 * 6_400
    assert sum(found.prompt_tokens) - sum(found.cached_tokens) == sum(found.computed[0])
    assert (max(found.running[0]), max(found.waiting[0])) == (2, 2)
    assert max(found.blocks_used[0]) >= 116
    assert (found.running[0][-1], found.queued[-1]) == (0, 0)


def test_requests_held_by_the_router_are_shown() -> None:
    turns = [turn(number, 6_400) for number in range(4)]
    outcome = Simulation(fleet(1), policy("kv:queue.threshold=0")).run(Turns(*turns), lambda _: None)
    assert max(outcome.timeline.queued) == 3
