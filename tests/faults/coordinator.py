"""Stand-in for the consumer group of routers: draws which router gets the control partition.

Faust is not simulated. Like a Kafka group coordinator, this one notices a member that is silent for a session timeout,
and assigns the partition again to all members in each rebalance. Faults make it assign wrongly for some time, which the
real group does after pauses and splits: to two routers, to none, or to another one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from forebay.live.router.router import Router
from tests.faults.loop import VirtualLoop
from tests.faults.process import Process

SESSION_S = 2.0
CHECK_S = 0.25
NOTICE_S_MAX = 0.3  # until a member learns of its assignment
PARTITION = 0


@dataclass(slots=True)
class _Member:
    process: Process
    router: Router
    silent_s: float = 0.0
    is_expelled: bool = False


class Coordinator:
    """Assigns control partition 0 to one of the routers that joined.

    Attributes:
        wrong: assigned members in place of the right one; None normally.
    """

    def __init__(self, loop: VirtualLoop, seed: str, is_cut: Callable[[Process], bool]) -> None:
        self.wrong: Callable[[list[str]], list[str]] | None = None
        self.rebalances = 0
        self._loop = loop
        self._random = Random(f"{seed}/coordinator")
        self._is_cut = is_cut
        self._members: dict[str, _Member] = {}
        self._chosen: str | None = None
        loop.call_main_later(CHECK_S, self._check)

    def join(self, process: Process, router: Router) -> None:
        """Add a router to the group, which causes a rebalance."""
        self._members[process.label] = _Member(process, router)
        self._loop.call_main_later(self._random.random(), self.rebalance)

    def leave(self, process: Process) -> None:
        """Remove a router that stops in order, which causes a rebalance."""
        if self._members.pop(process.label, None) is not None:
            self._loop.call_main_later(CHECK_S, self.rebalance)

    def rebalance(self) -> None:
        """Assign the partition again. The member that has it keeps it, if it is still a member."""
        self.rebalances += 1
        labels = [label for label, member in self._members.items() if not member.is_expelled]
        if self._chosen not in labels:
            self._chosen = self._random.choice(labels) if labels else None
        chosen = [] if self._chosen is None else [self._chosen]
        if self.wrong is not None:
            chosen = self.wrong(labels)
        for label in labels:
            member = self._members[label]
            partitions = {PARTITION} if label in chosen else set()
            member.process.call_later(self._random.random() * NOTICE_S_MAX, member.router.assign, partitions)

    def move(self) -> None:
        """Assign the partition to another member."""
        others = [label for label, member in self._members.items() if label != self._chosen and not member.is_expelled]
        if others:
            self._chosen = self._random.choice(others)
        self.rebalance()

    def _check(self) -> None:
        """Expel members that are silent for too long, and let those that respond again rejoin."""
        changed = False
        for label, member in list(self._members.items()):
            is_silent = not member.process.alive or member.process.paused or self._is_cut(member.process)
            member.silent_s = member.silent_s + CHECK_S if is_silent else 0.0
            should_be_expelled = member.silent_s >= SESSION_S
            if should_be_expelled != member.is_expelled:
                member.is_expelled = should_be_expelled
                changed = True
            if member.is_expelled and not member.process.alive:
                del self._members[label]
        if changed:
            self.rebalance()
        self._loop.call_main_later(CHECK_S, self._check)
