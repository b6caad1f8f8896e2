"""Turns arrive after the responses they depend on, and the workload is read only as far as needed."""

from collections.abc import Iterator

import pytest

from forebay.engine_model.timing import decode_us, prefill_us
from forebay.simulate.outcome import RequestOutcome
from forebay.simulate.settings import Delay, Delays, Settings, policy
from forebay.simulate.simulation import Simulation
from forebay.simulate.workload import Survey, Turn, WorkloadUnusable
from tests.simulate.fleets import Turns, fleet, turn

S = 1_000_000


def served(system: Settings, *turns: Turn) -> dict[int, RequestOutcome]:
    outcome = Simulation(system, policy("round-robin")).run(Turns(*turns), lambda _: None)
    return {one.number: one for one in outcome.requests}


def test_a_turn_arrives_its_think_time_after_its_dependency() -> None:
    found = served(fleet(), turn(0), turn(1, after=(0,), delay_us=S), turn(2, after=(1,)), turn(3, at_us=9 * S))
    assert found[1].arrived_us == found[0].last_us + S
    assert found[2].arrived_us == found[1].last_us


def test_a_turn_arrives_after_all_dependencies_and_not_before_its_own_time() -> None:
    both, late = turn(2, after=(0, 1), delay_us=7), turn(3, after=(0,), at_us=5 * S)
    found = served(fleet(), turn(0), turn(1, output=50), both, late)
    assert found[1].last_us > found[0].last_us
    assert found[2].arrived_us == found[1].last_us + 7
    assert found[3].arrived_us == 5 * S


def test_response_completes_when_the_client_has_received_it() -> None:
    delays = Delays(tokens=Delay(fixed_us=3_000))
    found = served(fleet(delays=delays), turn(0), turn(1, after=(0,), delay_us=S))
    assert found[0].last_us == prefill_us(64) + 3_000
    assert found[1].arrived_us == found[0].last_us + S


def test_dependent_request_arrives_after_a_failed_dependency() -> None:
    found = served(fleet(), turn(0, 16_385 * 64, at_us=S), turn(1, after=(0,), delay_us=4))
    assert (bool(found[0].failure), found[1].failure, found[1].arrived_us) == (True, "", S + 4)


def test_a_turn_read_after_its_dependency_completed_counts_from_the_completion() -> None:
    found = served(fleet(), turn(0), turn(1, at_us=S), turn(2, after=(0,), delay_us=30 * S), turn(3, at_us=2 * S))
    assert found[2].arrived_us == found[0].last_us + 30 * S


def test_a_turn_read_too_late_arrives_at_once() -> None:
    found = served(fleet(), turn(0), turn(1, at_us=9 * S), turn(2, after=(0,)), turn(3, at_us=9 * S))
    assert [one.arrived_us for one in found.values()] == [0, 9 * S, 9 * S, 9 * S]


def test_simultaneous_turns_arrive_in_file_order() -> None:
    answer_us = prefill_us(64)
    turns = turn(0), turn(1, after=(0,), delay_us=S - answer_us), turn(2, at_us=S), turn(3, after=(0,), at_us=S)
    outcome = Simulation(fleet(), policy("kv")).run(Turns(*turns), lambda _: None)
    assert [(one.number, one.arrived_us) for one in outcome.requests] == [(0, 0), (1, S), (2, S), (3, S)]


def test_engine_steps_end_before_dependent_arrivals() -> None:
    # Both start decoding together. The turn that depends on the short response goes to the engine of the long one.
    found = served(fleet(), turn(0, output=60), turn(1, output=2), turn(2, after=(1,)))
    assert found[2].worker == 0
    decode, prefill = decode_us(2, 16_384), prefill_us(64)
    assert found[2].arrived_us == found[1].last_us == prefill + decode
    assert found[2].first_us == prefill + decode + prefill + decode


def test_engine_steps_end_before_arrivals_with_one_completed_dependency() -> None:
    late, soon = turn(3, after=(1,), delay_us=90 * S), turn(4, after=(2,))
    found = served(fleet(3), turn(0, output=60), turn(1, output=2), turn(2, output=5), late, soon)
    decode, prefill = decode_us(2, 16_384), prefill_us(64)
    assert (found[4].worker, found[4].arrived_us) == (0, prefill + 4 * decode)
    assert found[4].first_us == found[4].arrived_us + prefill + decode


def test_error_names_turn_with_missing_dependency() -> None:
    with pytest.raises(WorkloadUnusable, match="request 1 depends on request 7, which does not come before it"):
        served(fleet(), turn(0), turn(1, after=(7,)))


class Sessions:
    """Sessions of three turns each. Counts the turns that were read and have not arrived yet."""

    name, block_tokens = "sessions", 64

    def __init__(self, sessions: int) -> None:
        self._sessions = sessions
        self.read = self.arrived = self.ahead = 0

    def survey(self) -> Survey:
        return Survey(requests=self._sessions * 3)

    def turns(self) -> Iterator[Turn]:
        for number in range(0, self._sessions * 3, 3):
            yield self._one(turn(number, at_us=number * S))
            yield self._one(turn(number + 1, after=(number,), delay_us=S // 2))
            yield self._one(turn(number + 2, after=(number + 1,), delay_us=S // 2))

    def on_arrived(self, arrived: int) -> None:
        self.arrived = arrived

    def _one(self, one: Turn) -> Turn:
        self.read += 1
        self.ahead = max(self.ahead, self.read - self.arrived)
        return one


def test_a_workload_is_read_incrementally() -> None:
    sessions = Sessions(200)
    outcome = Simulation(fleet(), policy("kv")).run(sessions, sessions.on_arrived)
    assert len(outcome.requests) == 600
    assert sessions.ahead <= 4
