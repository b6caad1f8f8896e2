"""A log that grows, for programs that follow its journal."""

from forebay.events.progress import RequestFinished
from forebay.transport.sqlite.log import SqliteLog
from tests.replay.recorder import Recorder, fleet

TENANTS = ("acme", "umbrella")


def history(requests: int, *, after_us: int = 10) -> Recorder:
    """Return a history in which each request ends after the next one has begun. The last one is in flight."""
    made = fleet()
    for number in range(requests):
        made.ask(f"r{number}", tenant=TENANTS[number % 2], key_id=f"k{number % 3}", timeout_us=80_000_000_000)
        if number:
            made.progress(f"r{number - 1}", RequestFinished, after_us, finish_reason="stop", output_tokens=number)
        made.seal()
    return made


class Growing:
    """A log whose journal appears record by record."""

    def __init__(self, made: Recorder) -> None:
        self.log = SqliteLog.open(None)
        self._made = made
        self._left = made.journal_drafts()

    async def begin(self) -> None:
        await self.log.append(self._made.drafts)

    async def grow(self, count: int) -> None:
        drafts, self._left = self._left[:count], self._left[count:]
        if drafts:
            await self.log.append(drafts)

    async def end(self) -> None:
        await self.grow(len(self._left))
