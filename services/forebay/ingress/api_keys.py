"""The API keys that an ingress accepts: those of its options and its file, and those of tenants on the topic `keys`."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b, sha256

from forebay import runtime
from forebay.events.keys import KEY_ID_DIGITS, NO_KEY, KeySet
from forebay.ingress.key_file import KeyFile, read_keys
from forebay.runtime.errors import ConfigError
from forebay.transport.keys import KeyBook

SECRET_BYTES = 32
CHECK_S = 1.0  # between two readings of the file

logger = logging.getLogger(__name__)


class ApiKeys:
    """The API keys that a server accepts. `run` keeps those of the file and of the topic current.

    A client cannot predict digests of keys without a tenant, because they contain a secret of this process. So the time
    of the lookup does not tell how much of a key the client has guessed. The keys of tenants are random numbers of 256
    bits, and are found by their SHA-256. A client that learnt a part of a stored hash could not derive a part of the
    key from it.

    Args:
        keys: keys without a tenant.
        book: keys of tenants on the topic; None if the server accepts none.
        file: file with further keys, also of tenants.
        admin_token: token that must not become an API key when the file changes.
        on_unusable: called whenever the changed file cannot be used.

    Attributes:
        is_required: whether clients without a key are rejected.
    """

    def __init__(
        self,
        keys: Sequence[str],
        book: KeyBook | None = None,
        file: KeyFile | None = None,
        *,
        admin_token: str = "",
        on_unusable: Callable[[], None] = lambda: None,
        is_required: bool = True,
    ) -> None:
        self.is_required = is_required
        self._secret = runtime.random_bytes(SECRET_BYTES)
        self._given = keys
        self._book = book
        self._admin_token = admin_token
        self._on_unusable = on_unusable
        self._problem = ""
        self._use(file)

    @property
    def in_use(self) -> bool:
        """Whether a wrong key is rejected."""
        return self.is_required or (self._book is not None and bool(self._book.keys))

    def find(self, key: bytes) -> KeySet | None:
        """Return the event of a key, also if it is revoked or has expired; `NO_KEY` for one without a tenant."""
        if self._digests and self._digest(key) in self._digests:
            return NO_KEY
        digest = sha256(key).hexdigest()
        event = self.find_id(digest[:KEY_ID_DIGITS])
        return event if event is not None and event.key_hash == digest else None

    def find_id(self, key_id: str) -> KeySet | None:
        """Return the event of the tenant's key with this id, also if the key is revoked or has expired."""
        event = None if self._file is None else self._file.tenants.get(key_id)
        return event if event is not None or self._book is None else self._book.keys.get(key_id)

    async def start(self) -> None:
        """Read the keys on the topic. Raises LogError."""
        assert self._book is not None, "the server accepts keys of tenants"
        await self._book.start()

    async def run(self) -> None:
        """Follow the topic and the file until cancelled. Raises LogError."""
        assert self._book is not None, "the server accepts keys of tenants"
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
        keys = self._given if file is None else (*self._given, *file.plain)
        self._digests = frozenset(self._digest(key.encode()) for key in keys)

    def _digest(self, key: bytes) -> bytes:
        return blake2b(key, key=self._secret).digest()
