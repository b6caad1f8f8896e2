"""Store and load the model cards and the files of models, on the topic `models`.

Theory of operation. A file is stored once per content: another card with the same file refers to the same pieces. The
card is appended after its files are durable, so each card on the topic can be loaded. Two processes that store the same
card at the same time append it twice. Both copies are complete, and the newer one counts. A reader checks the SHA-256
of the card and of every file, so it never uses content that differs from what a worker announced.

A record without a value removes a card. Its pieces are removed after that, except those that another card on the topic
names. A process that stores a card, and reuses pieces of another card, might not have read the removal of that card
yet. So it reads the topic up to its own record, and stores the files again if no earlier card names their pieces.
"""

import asyncio
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import sha256

from forebay import runtime
from forebay.events.answers import RETENTION_S
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.models import CHUNK_BYTES_MAX, AliasSet, FileChunk, ModelCard, ModelStored, StoredFile
from forebay.events.topics import ANSWERS, MODELS
from forebay.transport.base import Draft, Log, LogError, Record, event_at
from forebay.transport.follower import Follower
from forebay.transport.heartbeats import owner_of

CARDS, CONTENT = 0, 1  # partitions of the topic
FILE_BYTES_MAX = 128 << 20  # of one file; tokenizers with 260,000 tokens have 35 MB
CARD_BYTES_MAX = 256 << 20  # of all files of a card
LEVEL = 6
# A card is needed for as long as answers are kept after its last request. Workers may use it for up to a day after
# another card of the model was stored, because a fleet is replaced step by step.
NEEDED_S = RETENTION_S + 86_400


class ModelMissing(LogError):
    """The topic has no card with this digest, or retention removed a part of its files."""


class ModelDamaged(LogError):
    """The content of a stored file differs from the digest in its card."""


class ModelStore(Follower):
    """The cards on the topic `models` by digest, in the order of their newest records. `run` reads new ones."""

    def __init__(self, log: Log) -> None:
        super().__init__(log, MODELS)
        self.cards: dict[str, ModelStored] = {}
        self.aliases: dict[str, AliasSet] = {}

    async def start(self) -> None:
        """Read all stored cards, without the content of their files. Raises LogError."""
        await self.read_all(CARDS)

    async def stored(self, digest: str) -> ModelStored:
        """Wait until the topic has the card with this digest, and return its record. Raises LogError."""
        await self.wait_until(lambda: digest in self.cards)
        return self.cards[digest]

    async def removed(self, digest: str) -> None:
        """Wait until the topic lacks the card with this digest. Raises LogError."""
        await self.wait_until(lambda: digest not in self.cards)

    async def store(self, model: str, card: ModelCard, files: Mapping[str, bytes]) -> str:
        """Store a card and its files unless they are stored already, and return the digest of the card."""
        digest = card.digest()
        if digest in self.cards:
            return digest
        await self._store_card(model, card, files)
        return digest

    async def remove(self, digests: Collection[str]) -> None:
        """Remove cards, and the pieces of files that no other card names.

        Raises LogError if the log fails. Pieces may remain then, which nothing names.
        """
        digests = [digest for digest in digests if digest in self.cards]  # another process may have removed them
        places = [place for digest in digests for place in self.cards[digest].stored]
        if not digests:
            return
        drafts = [Draft(MODELS.name, CARDS, b"", digest.encode()) for digest in digests]
        await self.reach(max(await self._log.append(drafts)) + 1)
        kept = {offset for place in self._places() for offset in place.offsets}
        for offset in {offset for place in places for offset in place.offsets} - kept:
            chunk = await event_at(self._log, MODELS, CONTENT, offset)
            if isinstance(chunk, FileChunk):
                await self._log.append([Draft(MODELS.name, CONTENT, b"", chunk.key)])

    async def set_alias(self, event: AliasSet) -> None:
        """Set or remove an alias. Raises LogError if the log fails."""
        await self._log.append([Draft(MODELS.name, CARDS, encode(MODELS, event), event.key)])

    async def load(self, digest: str) -> dict[str, bytes]:
        """Return the content of all files of a card by name.

        Raises ModelMissing if the topic lacks the card or a piece of a file, ModelDamaged if a file has another SHA-256
        than the card states, or LogError.
        """
        stored = self.cards.get(digest)
        if stored is None:
            raise ModelMissing(f"the topic {MODELS.name} has no model card {digest}")
        size = sum(file.size for file in stored.card.files)
        if size > CARD_BYTES_MAX:
            raise ModelDamaged(f"the files of the model card {digest} have {size:,} bytes, at most {CARD_BYTES_MAX:,}")
        places = {one.sha256: one for one in stored.stored}
        contents: dict[str, bytes] = {}
        for file in stored.card.files:
            if file.sha256 not in contents:
                place = places.get(file.sha256)
                if place is None:
                    raise ModelMissing(f"the model card {digest} does not name the location of {file.name}")
                contents[file.sha256] = await self._load_file(file.name, file.size, place)
        return {file.name: contents[file.sha256] for file in stored.card.files}

    def _places(self, without: str = "") -> Iterator[StoredFile]:
        """Yield the locations that all cards name, except the card with the digest `without`."""
        for digest, stored in self.cards.items():
            if digest != without:
                yield from stored.stored

    async def _store_card(self, model: str, card: ModelCard, files: Mapping[str, bytes]) -> None:
        """Append a card, and those of its files that no other card names."""
        digest, places = card.digest(), []
        known = {place.sha256: place for place in self._places(digest)}
        for sha in dict.fromkeys(file.sha256 for file in card.files):
            name = next(file.name for file in card.files if file.sha256 == sha)
            places.append(known.get(sha) or await self._store_file(sha, files[name]))
        event = ModelStored(model=model, card=card, stored=tuple(places), at_us=runtime.wall_us())
        (offset,) = await self._log.append([Draft(MODELS.name, CARDS, encode(MODELS, event), digest.encode())])
        await self.reach(offset + 1)
        named = set(self._places(digest))
        if any(place in known.values() and place not in named for place in places):
            await self._store_card(model, card, files)

    async def _store_file(self, sha: str, content: bytes) -> StoredFile:
        packed = await runtime.offload(zlib.compress, content, LEVEL)
        upload = runtime.random_id()
        offsets = []
        for index, at in enumerate(range(0, len(packed), CHUNK_BYTES_MAX)):
            chunk = FileChunk(sha256=sha, upload=upload, index=index, data=packed[at : at + CHUNK_BYTES_MAX])
            offsets += await self._log.append([Draft(MODELS.name, CONTENT, encode(MODELS, chunk), chunk.key)])
        return StoredFile(sha256=sha, offsets=tuple(offsets))

    async def _load_file(self, name: str, size: int, place: StoredFile) -> bytes:
        if size > FILE_BYTES_MAX:
            raise ModelDamaged(f"{name} has {size:,} bytes, at most {FILE_BYTES_MAX:,} are allowed")
        pieces, packed_bytes = [], 0
        for offset in place.offsets:
            pieces.append(await self._chunk(name, place.sha256, offset))
            packed_bytes += len(pieces[-1])
            if packed_bytes > FILE_BYTES_MAX:
                raise ModelDamaged(f"the stored pieces of {name} have more than {FILE_BYTES_MAX:,} bytes")
        content = await runtime.offload(_unpacked, b"".join(pieces), size, place.sha256)
        if content is None:
            raise ModelDamaged(f"the stored content of {name} does not have the SHA-256 {place.sha256} of its card")
        return content

    async def _chunk(self, name: str, sha: str, offset: int) -> bytes:
        chunk = await event_at(self._log, MODELS, CONTENT, offset)
        if not isinstance(chunk, FileChunk) or chunk.sha256 != sha:
            raise ModelMissing(f"the topic {MODELS.name} has no piece of {name} at offset {offset}")
        return chunk.data

    def apply(self, record: Record) -> None:
        if not record.value:
            self.cards.pop((record.key or b"").decode(errors="replace"), None)
            return
        event = decode(MODELS, record.value)
        if isinstance(event, AliasSet):
            self.aliases.pop(event.alias, None)
            if event.targets:
                self.aliases[event.alias] = event
        elif not isinstance(event, ModelStored):
            raise DecodeError(f"expected a model card or an alias, got an event {type(event).__name__}")
        elif record.key != (digest := event.card.digest()).encode():
            raise DecodeError(f"its key is {record.key!r}, but the card has the digest {digest}")
        else:
            self.cards.pop(digest, None)  # the newest record comes last
            self.cards[digest] = event


async def stored_card(log: Log, model: str, card: ModelCard, files: Mapping[str, bytes]) -> str:
    """Store a model card and its files unless they are stored already, and return its digest. Raises LogError."""
    store = ModelStore(log)
    await store.start()
    try:
        return await store.store(model, card, files)
    finally:
        store.close()


def _unpacked(packed: bytes, size: int, sha: str) -> bytes | None:
    """Return the content, or None if the compressed bytes do not hold `size` bytes with this SHA-256."""
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(packed, size + 1)
    except zlib.error:
        return None
    return content if len(content) == size and sha256(content).hexdigest() == sha else None


class UseUnknown(LogError):
    """A group has no owner, so nobody knows which card its workers use."""


async def cards_in_use(log: Log, partitions: Mapping[str, int]) -> dict[str, str]:
    """Return the digest of the card that the workers of each group use; groups without a card are left out.

    Raises UseUnknown if a group has no owner, or LogError.
    """
    owners = await asyncio.gather(*(owner_of(log, group, number) for group, number in partitions.items()))
    unknown = [group for group, owner in zip(partitions, owners, strict=True) if owner is None]
    if unknown:
        raise UseUnknown(
            f"no router owns {', '.join(unknown)} now, so it is unknown which model cards its workers use; start a"
            " router and try again"
        )
    return {owner.group: owner.card for owner in owners if owner is not None and owner.card}


def superseded_by(store: ModelStore, model: str, digest: str) -> list[str]:
    """Return the cards of a model that were stored before this one, if stored; newer cards may be for later use."""
    stored = list(store.cards)
    before = stored[: stored.index(digest)] if digest in store.cards else []
    return [one for one in before if store.cards[one].model == model]


async def needed_by_answers(log: Log, store: ModelStore) -> set[str]:
    """Return the cards that kept answers may need: each was the newest one of its model within `NEEDED_S`.

    Raises LogError.
    """
    if await log.begin(ANSWERS.name, 0) == await log.end(ANSWERS.name, 0):
        return set()
    since_us, needed, replaced_us = runtime.wall_us() - NEEDED_S * 1_000_000, set[str](), dict[str, int]()
    for digest, stored in reversed(store.cards.items()):
        if replaced_us.get(stored.model, since_us) >= since_us:
            needed.add(digest)
        replaced_us[stored.model] = stored.at_us
    return needed


async def remove_unused(
    log: Log, store: ModelStore, partitions: Mapping[str, int], digests: Iterable[str]
) -> list[str]:
    """Remove the cards that neither a worker nor an answer needs. Return their digests. Raises as `cards_in_use`."""
    wanted = list(digests)
    if not wanted:
        return []
    used = {*(await cards_in_use(log, partitions)).values(), *await needed_by_answers(log, store)}
    unused = [digest for digest in wanted if digest in store.cards and digest not in used]
    if unused:
        await store.remove(unused)
    return unused
