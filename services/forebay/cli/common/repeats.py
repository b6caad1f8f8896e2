"""Log output that stays readable during an outage: a repeated problem is shown once, then counted.

Client libraries log each failed attempt to reconnect, which was 68,000 lines in the five minutes of one outage.
"""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

SUMMARY_S = 30.0  # minimum time between two lines about the same problem
KINDS_MAX = 256  # maximum number of problems in memory; a process has a few dozen
NUMBERS = re.compile(r"\d+")


@dataclass(slots=True)
class _Problem:
    """A problem: when it was last written, its newest record, and the number of repetitions since."""

    at_s: float
    record: logging.LogRecord
    hidden: int = 0


class CountingHandler(logging.StreamHandler[TextIO]):
    """Logging handler that writes a repeated warning or error once, and later the number of repetitions.

    The number is written at most every `SUMMARY_S` seconds per problem. Two records of forebay are the same problem if
    their texts are equal. Records of libraries contain node ids, ports and durations, so their texts may differ in
    numbers. Records below WARNING are always written.
    """

    def __init__(self, stream: TextIO, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock_s = clock_s
        self._shown: dict[tuple[str, int, str], _Problem] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or only count it if it repeats a problem."""
        now_s = self._clock_s()
        self._write_summaries(now_s - SUMMARY_S)
        if record.levelno < logging.WARNING:
            super().emit(record)
            return
        text = record.getMessage()
        kind = (record.name, record.levelno, text if _is_ours(record) else NUMBERS.sub("#", text))
        shown = self._shown.get(kind)
        if shown is not None:
            shown.hidden += 1
            shown.record = record
            return
        if len(self._shown) >= KINDS_MAX:
            self._write_summary(self._shown.pop(next(iter(self._shown))))
        self._shown[kind] = _Problem(now_s, record)
        super().emit(record)

    def close(self) -> None:
        """Write the number of repetitions of each problem that was not written yet."""
        self._write_summaries(self._clock_s())
        super().close()

    def _write_summaries(self, until_s: float) -> None:
        """Write the repetitions of problems last written before `until_s`, and forget problems without repetitions."""
        for kind in [kind for kind, shown in self._shown.items() if shown.at_s <= until_s]:
            shown = self._shown.pop(kind)
            if shown.hidden:
                self._write_summary(shown)
                # The outage continues, so further repetitions are only counted.
                self._shown[kind] = _Problem(self._clock_s(), shown.record)

    def _write_summary(self, shown: _Problem) -> None:
        if shown.hidden:
            seconds = max(1, round(self._clock_s() - shown.at_s))
            text = f"{shown.record.getMessage()} (repeated {shown.hidden} times in {seconds} s)"
            plain = {**shown.record.__dict__, "msg": text, "args": None, "exc_info": None, "exc_text": None}
            super().emit(logging.makeLogRecord(plain))


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == "forebay"
