"""The API keys on the topic `keys`: an event per key, with the hash of the key and the rights of its tenant."""

from forebay.events.codec import DecodeError, decode, encode
from forebay.events.keys import KEY_ID_DIGITS, KeySet
from forebay.events.topics import KEYS
from forebay.transport.base import Draft, Log, Record
from forebay.transport.follower import Follower

PARTITION = 0  # of the topic `keys`
KEYS_MAX = 100_000  # about 100 MB of memory


class KeyBook(Follower):
    """The newest event of each API key. `run` reads new ones."""

    def __init__(self, log: Log) -> None:
        super().__init__(log, KEYS)
        self.keys: dict[str, KeySet] = {}  # by id of the API key

    async def start(self) -> None:
        """Read all keys. Raises LogError."""
        await self.read_all(PARTITION)

    async def set(self, event: KeySet) -> None:
        """Append the event of a key, and wait until it was read. Raises LogError."""
        await self._append(encode(KEYS, event), event.key)

    async def forget(self, tenant: str) -> int:
        """Remove all keys of a tenant, and return their number. Raises LogError."""
        forgotten = [event for event in self.keys.values() if event.tenant == tenant]
        for event in forgotten:
            await self._append(b"", event.key)
        return len(forgotten)

    async def _append(self, value: bytes, key: bytes) -> None:
        (offset,) = await self._log.append([Draft(KEYS.name, PARTITION, value, key)])
        await self.reach(offset + 1)

    def apply(self, record: Record) -> None:
        if not record.value:
            self.keys.pop((record.key or b"").decode(errors="replace")[:KEY_ID_DIGITS], None)
            return
        event: KeySet = decode(KEYS, record.value)
        if record.key != event.key:
            raise DecodeError(f"its key is {record.key!r}, but the event is about the API key {event.key_id}")
        if len(self.keys) >= KEYS_MAX and event.key_id not in self.keys:
            raise DecodeError(f"there are {KEYS_MAX:,} API keys already")
        self.keys[event.key_id] = event
