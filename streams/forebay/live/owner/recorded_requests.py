"""Requests read back from the log, for work that is given out again: their prompts are kept nowhere else."""

from forebay.events.codec import decode
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import REQUESTS
from forebay.transport.base import Log, LogError, Record

PAGE_RECORDS = 128  # a lost worker's requests mostly lie near each other


class AskedReader:
    """Reads submissions by offset; quick when offsets ascend."""

    def __init__(self, log: Log, partition: int) -> None:
        self._log = log
        self._partition = partition
        self._page: dict[int, Record] = {}

    async def at(self, offset: int) -> RequestSubmitted:
        """The submission at `offset`. Raises LogError when it is gone."""
        if offset not in self._page:
            records = await self._log.read(REQUESTS.name, self._partition, offset, PAGE_RECORDS)
            self._page = {record.offset: record for record in records}
        if offset not in self._page:
            raise LogError(f"the request at {REQUESTS.name}/{self._partition} offset {offset} is gone, but under way")
        event: RequestSubmitted = decode(REQUESTS, self._page[offset].value)
        return event

    def forget(self) -> None:
        """Keep no page: prompts are large."""
        self._page = {}
