"""Events of a history as journal records consume them."""

from collections.abc import Iterable

from forebay.core.step import InputEvent
from forebay.events.decisions import ConsumedRun, JournalRecord
from tests.core.worlds import Applied


def events_by_topic(applied: Iterable[Applied]) -> dict[str, list[InputEvent | None]]:
    found: dict[str, list[InputEvent | None]] = {}
    for topic, event, _ in applied:
        found.setdefault(topic, []).append(event)
    return found


class Recorded:
    """The events of a history, given out as journal records consume them."""

    def __init__(self, applied: Iterable[Applied]) -> None:
        self._left = events_by_topic(applied)

    def events_of(self, record: JournalRecord) -> dict[str, list[InputEvent | None]]:
        taken: dict[str, list[InputEvent | None]] = {}
        for run in record.consumed:
            if run.count:
                left = self._left[run.topic]
                taken.setdefault(run.topic, []).extend(left[: run.count])
                del left[: run.count]
        return taken


def flat(consumed: Iterable[ConsumedRun]) -> list[tuple[str, int]]:
    return [(run.topic, run.now_us) for run in consumed for _ in range(run.count)]
