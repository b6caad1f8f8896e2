"""The API keys that an ingress accepts: those of its options and its file, and those of tenants on the topic `keys`."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b, sha256

from forebay import runtime
from forebay.events.keys import KeySet
from forebay.ingress.key_file import KeyFile, read_keys
from forebay.runtime.errors import ConfigError
from forebay.transport.base import Log
from forebay.transport.keys import KeyBook

SECRET_BYTES = 32
CHECK_S = 1.0  # between two readings of the file

logger = logging.getLogger(__name__)


class PlainKeys:
    """Keys without a tenant, of which a client must send one.

    A client cannot predict digests with the secret of this process. So the time of the lookup does not tell how much of
    a key the client has guessed.

    Attributes:
        is_required: whether clients without a key are rejected.
    """

    def __init__(self, keys: Sequence[str], *, is_required: bool = True) -> None:
        self.is_required = is_required
        self._secret = runtime.random_bytes(SECRET_BYTES)
        self._use_plain(keys)

    @property
    def in_use(self) -> bool:
        """Whether a wrong key is rejected."""
        return self.is_required

    def is_plain(self, key: bytes) -> bool:
        """Return whether this is a key without a tenant."""
        return bool(self._digests) and self._digest(key) in self._digests

    def find(self, key: bytes) -> KeySet | None:
        """Return the event of a tenant's key, also if the key is revoked or has expired; None for an unknown key."""
        del key
        return None

    def _use_plain(self, keys: Sequence[str]) -> None:
        self._digests = frozenset(self._digest(key.encode()) for key in keys)

    def _digest(self, key: bytes) -> bytes:
        return blake2b(key, key=self._secret).digest()


class ApiKeys(PlainKeys):
    """The API keys of an ingress. `run` keeps those of the file and of the topic current.

    The keys of tenants are random numbers of 256 bits, and are found by their SHA-256. A client that learnt a part of a
    stored hash from the time of lookups could not derive a part of the key from it.

    Args:
        keys: keys without a tenant.
        file: file with further keys, also of tenants.
        admin_token: token that must not become an API key when the file changes.
        on_unusable: called whenever the changed file cannot be used.
    """

    def __init__(
        self,
        log: Log,
        keys: Sequence[str],
        file: KeyFile | None,
        admin_token: str,
        on_unusable: Callable[[], None],
        *,
        is_required: bool,
    ) -> None:
        super().__init__(keys, is_required=is_required)
        self._book = KeyBook(log)
        self._given = keys
        self._admin_token = admin_token
        self._on_unusable = on_unusable
        self._problem = ""
        self._use(file)

    @property
    def in_use(self) -> bool:
        return self.is_required or bool(self._book.keys)

    def find(self, key: bytes) -> KeySet | None:
        digest = sha256(key).digest()
        return (self._file and self._file.tenants.get(digest)) or self._book.find(digest)

    def find_id(self, key_id: str) -> KeySet | None:
        """Return the event of the tenant's key with this id, also if the key is revoked or has expired."""
        return self._file_ids.get(key_id) or self._book.by_id.get(key_id)

    async def start(self) -> None:
        """Read the keys on the topic. Raises LogError."""
        await self._book.start()

    async def run(self) -> None:
        """Follow the topic and the file until cancelled. Raises LogError."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._book.run())
            while self._file is not None:
                await asyncio.sleep(CHECK_S)
                await self.check_file()

    async def check_file(self) -> None:
        """Use the keys of the file as it is now. If it is unusable, keep the previous keys, and log the reason once."""
        assert self._file is not None, "the ingress has a file of keys"
        try:
            file = await runtime.offload(read_keys, self._file.path)
            if self._admin_token in file.plain:
                raise ConfigError(f"--api-key-file {file.path}: a key is the admin token; choose two different values")
        except ConfigError as error:
            self._on_unusable()
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("%s; the previous keys stay in use", error)
            return
        self._problem = ""
        if file != self._file:
            self._use(file)
            logger.info("read %d keys from %s", len(file.plain) + len(file.tenants), file.path)

    def _use(self, file: KeyFile | None) -> None:
        self._file = file
        self._file_ids = {event.key_id: event for event in file.tenants.values()} if file else {}
        self._use_plain(self._given if file is None else (*self._given, *file.plain))
