"""Keyed one-to-one masks that replace hashes and names in an anonymised recording.

Theory of operation. Sequence hashes are public functions of the tokens with a public seed, so a short block can be
guessed and checked. With a key that no longer exists this is impossible. Each number is sent through a keyed
permutation: equal values stay equal, different values stay different, and no other relation remains. The permutation is
a Feistel network (Luby and Rackoff, 1988) whose rounds are keyed BLAKE2. Four rounds are as good as a random
permutation against an attacker who chooses inputs and has fewer than about 2**16 pairs. Two more rounds put that attack
out of reach.
"""

from array import array
from bisect import bisect_left
from functools import lru_cache
from hashlib import blake2b, blake2s
from struct import Struct

import msgspec

from forebay.core.state.active_request import id_hash
from forebay.events.base import hex_digest, pack_u64, unpack_u64
from forebay.events.codec import unknown_tag
from forebay.events.topics import Topic
from forebay.transport.base import LogError

KEY_BYTES = 32
ROUNDS = 6
BLOCKS_REMEMBERED = 1 << 16  # about 13 MB; prefixes recur often
IDS_REMEMBERED = 1 << 13  # each ID recurs in the progress of its response, then no more

NO_RECORD = b"\xc1"  # neither JSON nor MessagePack has this byte

_PLACE = Struct("<IQI")
_BUCKET_BITS = 8
_HALF_BITS = 32
_HALF_BYTES = 4
_HALF_MASK = (1 << _HALF_BITS) - 1


class NotAnonymizable(LogError):
    """Raised if an anonymised recording would not have the same decisions. Discard everything that was written."""


class Permutation:
    """Keyed permutation of the integers below 2**64.

    Args:
        key: the secret key.
        purpose: separates permutations of one key; up to 7 ASCII characters.
        remembered: number of results to cache.
    """

    def __init__(self, key: bytes, purpose: str, remembered: int = 0) -> None:
        self._rounds = [
            blake2s(key=key, person=f"{number}{purpose}".encode(), digest_size=_HALF_BYTES) for number in range(ROUNDS)
        ]
        self.of = lru_cache(maxsize=remembered)(self._of) if remembered else self._of

    def packed(self, values: bytes) -> bytes:
        """Return packed u64 values with each value permuted."""
        return pack_u64(map(self.of, unpack_u64(values)))

    def _of(self, value: int) -> int:
        left, right = value >> _HALF_BITS, value & _HALF_MASK
        for keyed in self._rounds:
            state = keyed.copy()
            state.update(right.to_bytes(_HALF_BYTES, "little"))
            left, right = right, left ^ int.from_bytes(state.digest(), "little")
        return right << _HALF_BITS | left


class Masks:
    """All masks of one key of `KEY_BYTES` bytes. Without the key no mask can be reversed.

    Attributes:
        blocks: permutation of sequence hashes and of an engine's own hashes, which may be the same numbers.
        contents: permutation of request content hashes.
        sessions: permutation of session keys.
        digests: permutation of digests that cannot be derived again.
    """

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES
        self._key = key
        self.blocks = Permutation(key, "blocks", BLOCKS_REMEMBERED)
        self.contents = Permutation(key, "content")
        self.sessions = Permutation(key, "session")
        self.digests = Permutation(key, "digest")
        self._ids = Permutation(key, "id", IDS_REMEMBERED)

    def name(self, kind: str, name: str) -> str:
        """Return `kind` (up to 16 ASCII characters) followed by 64 bits. An empty name stays empty."""
        if not name:
            return name
        return f"{kind}-{blake2b(name.encode(), key=self._key, person=kind.encode(), digest_size=8).hexdigest()}"

    def sha256(self, digest: str) -> str:
        """Return the mask of a hexadecimal SHA-256 digest."""
        return blake2b(bytes.fromhex(digest), key=self._key, person=b"sha256", digest_size=32).hexdigest()

    def undecodable(self, topic: Topic, value: bytes) -> bytes:
        """Return a replacement for a record that does not decode.

        It fails for the same reason and carries no other data.
        """
        tag = None if topic.events is None else unknown_tag(topic, value)
        if tag is None:
            return NO_RECORD
        encode = msgspec.json.encode if topic.codec == "json" else msgspec.msgpack.encode
        return encode({"type": self.name("unknown", tag)})

    def request_id(self, request_id: str) -> str:
        """Return the mask of a request ID."""
        return self.request_id_of(id_hash(request_id))

    def request_id_of(self, hashed: int) -> str:
        """Return the masked request ID for an `id_hash`. Snapshots keep only that hash of ended requests."""
        return f"request-{hex_digest(self._ids.of(hashed))}"

    def tie_seed(self, partition: int, offset: int, number: int) -> int:
        """Return candidate `number` in the sequence of tie seeds for the request at an offset of a partition."""
        data = _PLACE.pack(partition, offset, number)
        return int.from_bytes(blake2b(data, key=self._key, person=b"tie seed", digest_size=8).digest(), "little")


class HashPairs:
    """Map of 64-bit hashes to replacements, 16 bytes per pair. Pairs can be looked up after `seal`."""

    def __init__(self) -> None:
        # Buckets by the leading bits limit memory, because sorting creates an object per number.
        self._buckets = [(array("Q"), array("Q")) for _ in range(1 << _BUCKET_BITS)]

    def add(self, number: int, stand_in: int) -> None:
        """Add the replacement of a number. Adding the same pair twice is harmless."""
        numbers, stand_ins = self._bucket(number)
        numbers.append(number)
        stand_ins.append(stand_in)

    def seal(self) -> None:
        """Sort the pairs. No more pairs may be added."""
        for numbers, stand_ins in self._buckets:
            pairs = sorted(zip(numbers, stand_ins, strict=True))
            numbers[:] = array("Q", (number for number, _ in pairs))
            stand_ins[:] = array("Q", (stand_in for _, stand_in in pairs))

    def get(self, number: int) -> int | None:
        """Return the replacement of a number, or None if it was not added."""
        numbers, stand_ins = self._bucket(number)
        at = bisect_left(numbers, number)
        return stand_ins[at] if at < len(numbers) and numbers[at] == number else None

    def _bucket(self, number: int) -> "tuple[array[int], array[int]]":
        return self._buckets[number >> (64 - _BUCKET_BITS)]
