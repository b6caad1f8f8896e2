"""Repeated log records are shown once and then counted."""

import io
import logging

from forebay.cli.common.logs import KINDS_MAX, SUMMARY_S, CountingHandler


class HandlerOnFakeClock:
    """Handler with a clock set by the test. `lines` returns its output."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stream = io.StringIO()
        self.handler = CountingHandler(self.stream, lambda: self.now_s)

    def log(self, text: str, name: str = "aiokafka", level: int = logging.ERROR) -> None:
        self.handler.handle(logging.LogRecord(name, level, "", 0, "%s", (text,), None))

    @property
    def lines(self) -> list[str]:
        """Return the lines written so far."""
        return self.stream.getvalue().splitlines()


def test_a_five_minute_outage_is_logged_in_a_few_lines() -> None:
    scene = HandlerOnFakeClock()
    for number in range(68_000):
        scene.now_s = number * 300 / 68_000
        scene.log(f"Unable connect to node with id {number % 3}: [Errno 111]")
    scene.handler.close()
    assert scene.lines[0] == "Unable connect to node with id 0: [Errno 111]"
    assert len(scene.lines) <= 2 + 300 / SUMMARY_S
    assert sum(int(line.split("repeated ")[1].split()[0]) for line in scene.lines[1:]) == 68_000 - 1


def test_forebay_records_are_repeats_only_if_equal() -> None:
    scene = HandlerOnFakeClock()
    for worker in (1, 2, 2):
        scene.log(f"worker w{worker} is lost", "forebay.live.owner.admission", logging.WARNING)
    assert scene.lines == ["worker w1 is lost", "worker w2 is lost"]


def test_info_records_are_never_suppressed() -> None:
    scene = HandlerOnFakeClock()
    for _ in range(3):
        scene.log("assigned the control partitions [0]", "forebay.live.router.router", logging.INFO)
    assert len(scene.lines) == 3


def test_an_ended_problem_is_summarised_with_the_next_record_and_shown_again_on_recurrence() -> None:
    scene = HandlerOnFakeClock()
    scene.log("no answer")
    scene.log("no answer")
    scene.now_s = SUMMARY_S
    scene.log("all is well", level=logging.INFO)
    assert scene.lines == ["no answer", "no answer (repeated 1 times in 30 s)", "all is well"]
    scene.now_s = 2 * SUMMARY_S
    scene.log("all is well", level=logging.INFO)
    scene.log("no answer")
    assert scene.lines[3:] == ["all is well", "no answer"]


def test_many_different_problems_are_counted_in_bounded_memory() -> None:
    scene = HandlerOnFakeClock()
    for number in range(3 * KINDS_MAX):
        for _ in range(2):
            scene.log(f"record {number} is damaged", "forebay.live.owner.owner")
    scene.handler.close()
    assert len(scene.lines) == 6 * KINDS_MAX
