"""Find progress events from workers that were not selected, while a journal is derived again.

Unlike the live core, a walk sees every decision, so it knows where earlier attempts and ended requests were sent.
"""

from collections import deque
from collections.abc import Sequence
from typing import get_args

import msgspec

from forebay.core.step import AnyDecision, InputEvent, is_member
from forebay.events.decisions import CommandSent, RequestAborted, RequestRejected, RequestRouted
from forebay.events.progress import CommandDone, CommandRefused, RequestFailed, RequestFinished, RequestProgress
from forebay.events.requests import RequestSubmitted
from forebay.replay.walk import Walk

KEPT_US = 600_000_000  # after the end of a request; later progress of its workers counts as foreign
SHOWN_MAX = 20  # further events are only counted

Sent = tuple[int, str, int]


class ForeignEvent(msgspec.Struct, kw_only=True):
    """A progress event from a worker that was not selected.

    `selected` are the workers, with epochs, to which the owner sent this attempt, or those of all attempts if there is
    none. For a command, they are the workers to which the owner sent it. May be empty.
    """

    offset: int
    type: str
    about: str
    attempt: int
    reported_by: str
    reported_epoch: int
    selected: list[str]

    def text(self) -> str:
        subject = f"request {self.about}, attempt {self.attempt}" if self.attempt else f"command {self.about}"
        selected = f"was sent to {', '.join(self.selected)}" if self.selected else "was sent to no worker of this group"
        return (
            f"{subject}: {selected}; {self.type} at offset {self.offset} of progress is from worker "
            f"{self.reported_by}, epoch {self.reported_epoch}"
        )


class ForeignProgress:
    """Collects progress events from workers that were not selected, while `walk` derives the decisions."""

    def __init__(self, walk: Walk) -> None:
        """Register with `walk`, which must not have begun."""
        self.count = 0
        self.first: list[ForeignEvent] = []
        self._world = walk.world
        self._from_begin = walk.start == 0
        self._before = {request.submitted.request_id for request in walk.world.requests.active()}
        self._sent: dict[str, list[Sent]] = {}
        self._commands: dict[str, dict[str, int]] = {}
        self._ended: deque[tuple[int, str]] = deque()
        walk.followed.on_applied = self._on_applied

    def _on_applied(self, topic: str, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision]) -> None:
        if isinstance(event, RequestSubmitted):
            if (
                self._world.requests.get(event.request_id) is not None
            ):  # if not, the event repeats the submission of an ended request
                self._sent.setdefault(event.request_id, [])
        elif isinstance(event, get_args(RequestProgress)):
            self._check_progress(topic, event)
            if isinstance(event, RequestFinished | RequestFailed):
                self._end(event.request_id, now_us)
        elif isinstance(event, CommandDone | CommandRefused):
            self._check_command_result(topic, event)
        for decision in decided:
            match decision:
                case RequestRouted():
                    sent = decision.attempt, decision.worker_id, decision.worker_epoch
                    self._sent.setdefault(decision.request_id, []).append(sent)
                case CommandSent():
                    targets = {target.worker_id: target.worker_epoch for target in decision.targets}
                    self._commands.setdefault(decision.command_id, {}).update(targets)
                case RequestAborted() | RequestRejected():
                    self._end(decision.request_id, now_us)
                case _:
                    pass
        self._forget(now_us)

    def _check_progress(self, topic: str, event: RequestProgress) -> None:
        request_id, worker_id, epoch = event.request_id, event.worker_id, event.worker_epoch
        sent = self._sent.get(request_id)
        if request_id in self._before or (event.attempt, worker_id, epoch) in (sent or ()):
            return
        if sent is None:
            is_known = self._world.requests.known_content(request_id) is not None
            if is_known or not is_member(self._world, worker_id, epoch):
                return
        sent = sent or []
        selected = [one for one in sent if one[0] == event.attempt] or sent
        names = [f"{name}, epoch {number}" for _, name, number in selected]
        self._note(topic, event, request_id, event.attempt, names)

    def _check_command_result(self, topic: str, event: CommandDone | CommandRefused) -> None:
        # Compare names only: a worker that was lost and rejoined replies in its new epoch.
        targets = self._commands.get(event.command_id)
        if targets is None:
            if not self._from_begin or not is_member(self._world, event.worker_id, event.worker_epoch):
                return
            targets = {}
        if event.worker_id not in targets:
            names = [f"{name}, epoch {epoch}" for name, epoch in targets.items()]
            self._note(topic, event, event.command_id, 0, names)

    def _note(
        self,
        topic: str,
        event: RequestProgress | CommandDone | CommandRefused,
        about: str,
        attempt: int,
        selected: list[str],
    ) -> None:
        self.count += 1
        if len(self.first) < SHOWN_MAX:
            foreign = ForeignEvent(
                offset=self._world.view[topic] - 1,
                type=str(type(event).__struct_config__.tag),
                about=about,
                attempt=attempt,
                reported_by=event.worker_id,
                reported_epoch=event.worker_epoch,
                selected=selected,
            )
            self.first.append(foreign)

    def _end(self, request_id: str, now_us: int) -> None:
        if self._world.requests.get(request_id) is None:
            self._ended.append((now_us + KEPT_US, request_id))

    def _forget(self, now_us: int) -> None:
        while self._ended and self._ended[0][0] <= now_us:
            _, request_id = self._ended.popleft()
            if self._world.requests.get(request_id) is None:
                self._sent.pop(request_id, None)
