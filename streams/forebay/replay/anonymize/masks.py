"""Keyed masks that replace hashes and names in an anonymised recording.

Theory of operation. Sequence hashes are public functions of the tokens with a public seed, so a short block can be
guessed and checked. A keyed hash whose key was discarded prevents this. Each number is replaced by its keyed BLAKE2
hash of 64 bits: equal values stay equal, and no other relation remains. Different values collide as rarely as the
sequence hashes themselves. If a collision changed a decision, the derivation from the anonymised events would show it.
"""

from functools import lru_cache
from hashlib import blake2b

import msgspec

from forebay.core.state.submitted_request import id_hash
from forebay.events.base import U64_BYTES, hex_digest, pack_u64, unpack_u64
from forebay.events.codec import unknown_tag
from forebay.events.topics import Topic
from forebay.transport.base import LogError

KEY_BYTES = 32
BLOCKS_REMEMBERED = 1 << 16  # about 13 MB; prefixes recur often
IDS_REMEMBERED = 1 << 13  # the ID of a request recurs only until the end of its response

NO_RECORD = b"\xc1"  # neither JSON nor MessagePack has this byte


class NotAnonymizable(LogError):
    """Raised if an anonymised recording would not have the same decisions. Discard everything that was written."""


class HashMask:
    """Keyed hash of 64-bit numbers. Two of a billion numbers collide with a probability of three percent.

    `purpose` separates the masks of one key, in up to 16 ASCII characters.
    """

    def __init__(self, key: bytes, purpose: str, remembered: int = 0) -> None:
        self._keyed = blake2b(key=key, person=purpose.encode(), digest_size=U64_BYTES)
        self.of = lru_cache(maxsize=remembered)(self._of) if remembered else self._of

    def packed(self, values: bytes) -> bytes:
        return pack_u64(map(self.of, unpack_u64(values)))

    def _of(self, value: int) -> int:
        keyed = self._keyed.copy()
        keyed.update(value.to_bytes(U64_BYTES, "little"))
        return int.from_bytes(keyed.digest(), "little")


class Masks:
    """All masks with one key of `KEY_BYTES` bytes. Without the key no masked value can be reversed.

    `blocks` also masks an engine's own block hashes, which may be the same numbers as sequence hashes. `digests` masks
    digests that cannot be derived again.
    """

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES
        self._key = key
        self.blocks = HashMask(key, "blocks", BLOCKS_REMEMBERED)
        self.contents = HashMask(key, "content")
        self.sessions = HashMask(key, "session")
        self.digests = HashMask(key, "digest")
        self._ids = HashMask(key, "id", IDS_REMEMBERED)

    def name(self, kind: str, name: str) -> str:
        """Return the mask of a name: `kind` (up to 16 ASCII characters) and 64 bits in hex. Return "" for ""."""
        if not name:
            return name
        return f"{kind}-{blake2b(name.encode(), key=self._key, person=kind.encode(), digest_size=8).hexdigest()}"

    def sha256(self, digest: str) -> str:
        return blake2b(bytes.fromhex(digest), key=self._key, person=b"sha256", digest_size=32).hexdigest()

    def undecodable(self, topic: Topic, value: bytes) -> bytes:
        """Return a replacement that fails to decode for the same reason as `value`, without data of the original."""
        tag = None if topic.events is None else unknown_tag(topic, value)
        if tag is None:
            return NO_RECORD
        encode = msgspec.json.encode if topic.codec == "json" else msgspec.msgpack.encode
        return encode({"type": self.name("unknown", tag)})

    def request_id(self, request_id: str) -> str:
        return self.request_id_of(id_hash(request_id))

    def request_id_of(self, hashed: int) -> str:
        """Return the masked request ID for the `id_hash` of an ID. Snapshots hold only this hash of ended requests."""
        return f"request-{hex_digest(self._ids.of(hashed))}"
