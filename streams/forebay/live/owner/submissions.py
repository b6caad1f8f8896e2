"""Read submitted requests back from the log, because their prompts are not kept in memory."""

from forebay.events.codec import decode
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import REQUESTS
from forebay.transport.base import Log, LogError, Record

PAGE_RECORDS = 128  # the requests of a lost worker mostly have offsets close to each other


class SubmissionReader:
    """Reader of `RequestSubmitted` events by offset, with one page of records cached for ascending offsets."""

    def __init__(self, log: Log, partition: int) -> None:
        self._log = log
        self._partition = partition
        self._page: dict[int, Record] = {}

    async def at(self, offset: int) -> RequestSubmitted:
        """Return the submission at `offset`. Raises LogError if retention removed the record."""
        if offset not in self._page:
            records = await self._log.read(REQUESTS.name, self._partition, offset, PAGE_RECORDS)
            self._page = {record.offset: record for record in records}
        if offset not in self._page:
            raise LogError(
                f"the request at {REQUESTS.name}/{self._partition} offset {offset} is in flight, but retention removed"
                " its record; raise the retention of the topic"
            )
        event: RequestSubmitted = decode(REQUESTS, self._page[offset].value)
        return event

    def forget(self) -> None:
        """Drop the cached page, because prompts are large."""
        self._page = {}
