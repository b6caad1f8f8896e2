"""Sample where a process spends its CPU time, by group of functions.

A sample is attributed to the innermost frame that a group names, so library time counts for its caller. The signal
is delivered to the main thread, so the time of other threads counts for the main thread's current function.
"""

import signal
from collections import Counter
from types import CodeType, FrameType
from typing import Self

STEP_S = 0.001  # the kernel may round it up, to about 4 ms
REST = "event loop and rest"

# The first match wins: end of the file path, function ("" for any), group.
GROUPS: tuple[tuple[str, str, str], ...] = (
    ("", "take_snapshot", "snapshots"),
    ("", "_chunked", "snapshots"),
    ("forebay/core/", "snapshot", "snapshots"),
    ("forebay/core/world.py", "digest", "snapshots"),
    ("forebay/events/codec.py", "decode", "decode events"),
    ("forebay/events/codec.py", "encode", "encode events"),
    ("forebay/core/state/prefix_index.py", "overlaps", "core: overlaps"),
    ("forebay/core/state/block_sets.py", "drops", "core: overlaps"),
    ("forebay/core/state/prefix_index.py", "", "core: KV events"),
    ("forebay/core/state/block_sets.py", "", "core: KV events"),
    ("forebay/core/routing/cost.py", "", "core: costs and choice"),
    ("forebay/core/routing/selection.py", "", "core: costs and choice"),
    ("forebay/core/routing/router.py", "", "core: costs and choice"),
    ("forebay/core/state/load.py", "", "core: load"),
    ("forebay/core/state/requests.py", "", "core: requests"),
    ("forebay/core/", "", "core: step"),
    ("forebay/live/owner/effects.py", "", "effects"),
    ("forebay/live/owner/journal.py", "", "journal"),
    ("forebay/live/owner/owner.py", "_act", "effects"),
    ("forebay/live/owner/owner.py", "", "owner's turn"),
    ("forebay/live/owner/admission.py", "", "leases"),
    ("forebay/transport/redis/leases.py", "", "leases"),
    ("forebay/transport/kafka/writer.py", "", "Kafka: write"),
    ("forebay/transport/kafka/tail.py", "", "Kafka: read"),
    ("aiokafka/producer/", "", "Kafka: write"),
    ("aiokafka/consumer/", "", "Kafka: read"),
    ("aiokafka/codec.py", "", "Kafka: compression"),
    ("aiokafka/", "", "Kafka: connections"),
)


class Sampler:
    """Samples this process while entered as a context manager; use it in the main thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._groups: dict[CodeType, str | None] = {}

    def __enter__(self) -> Self:
        signal.signal(signal.SIGPROF, self._take)
        signal.setitimer(signal.ITIMER_PROF, STEP_S, STEP_S)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def shares(self) -> dict[str, float]:
        """Return the share of samples of each group, largest first."""
        total = sum(self._counts.values())
        return {group: count / total for group, count in self._counts.most_common()}

    def _take(self, _: int, frame: FrameType | None) -> None:
        while frame is not None:
            code = frame.f_code
            if code not in self._groups:
                self._groups[code] = group_of(code.co_filename, code.co_name)
            group = self._groups[code]
            if group is not None:
                self._counts[group] += 1
                return
            frame = frame.f_back
        self._counts[REST] += 1


def group_of(filename: str, function: str) -> str | None:
    """Return the group of a function, or None if its time counts for its caller."""
    for place, name, group in GROUPS:
        if place in filename and name in ("", function):
            return group
    return None
