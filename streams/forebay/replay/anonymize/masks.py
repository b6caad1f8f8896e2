"""One-to-one masks under a key: what an anonymised recording says in place of hashes and names.

Theory of operation. Sequence hashes are public functions of the tokens, with a public seed, so a short block can be
guessed and checked. Under a key that nobody has any more it cannot: each number is sent through a permutation, so
that equal stays equal, different stays different, and nothing else is left. The permutation is a Feistel network
(Luby and Rackoff, 1988), each round keyed BLAKE2. Four rounds are as good as a random permutation for an attacker
who chooses inputs, as long as he has fewer than some 2**16 pairs; two more rounds put that out of reach.
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
BLOCKS_REMEMBERED = 1 << 16  # some 13 MB: prefixes come again and again
IDS_REMEMBERED = 1 << 13  # each comes with its answer's progress again, and then no more

NO_RECORD = b"\xc1"  # neither JSON nor MessagePack has this byte

_PLACE = Struct("<IQI")
_BUCKET_BITS = 8
_HALF_BITS = 32
_HALF_BYTES = 4
_HALF_MASK = (1 << _HALF_BITS) - 1


class NotAnonymizable(LogError):
    """The recording cannot be told anew with the same decisions; nothing of it must be kept."""


class Permutation:
    """A permutation of the integers below 2**64, one for each key and purpose (at most 7 ASCII characters).

    So many results are `remembered`, to be had faster when they are asked for again.
    """

    def __init__(self, key: bytes, purpose: str, remembered: int = 0) -> None:
        self._rounds = [
            blake2s(key=key, person=f"{number}{purpose}".encode(), digest_size=_HALF_BYTES) for number in range(ROUNDS)
        ]
        self.of = lru_cache(maxsize=remembered)(self._of) if remembered else self._of

    def packed(self, values: bytes) -> bytes:
        """Every one of packed u64."""
        return pack_u64(map(self.of, unpack_u64(values)))

    def _of(self, value: int) -> int:
        left, right = value >> _HALF_BITS, value & _HALF_MASK
        for keyed in self._rounds:
            state = keyed.copy()
            state.update(right.to_bytes(_HALF_BYTES, "little"))
            left, right = right, left ^ int.from_bytes(state.digest(), "little")
        return right << _HALF_BITS | left


class Masks:
    """All masks of one key of `KEY_BYTES` bytes; whoever forgets the key can undo none of them.

    Attributes:
        blocks: of sequence hashes, and of an engine's own, which may be the same numbers.
        contents: of hashes of what requests ask for.
        sessions: of session keys.
        digests: of digests that cannot be derived again.
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
        """A name of a kind (at most 16 ASCII characters): the kind and 64 bits. No name stays none."""
        if not name:
            return name
        return f"{kind}-{blake2b(name.encode(), key=self._key, person=kind.encode(), digest_size=8).hexdigest()}"

    def sha256(self, digest: str) -> str:
        """A SHA-256 in hex."""
        return blake2b(bytes.fromhex(digest), key=self._key, person=b"sha256", digest_size=32).hexdigest()

    def undecodable(self, topic: Topic, value: bytes) -> bytes:
        """In place of a record that does not decode: one that does not for the same reason, and says nothing else."""
        tag = None if topic.events is None else unknown_tag(topic, value)
        if tag is None:
            return NO_RECORD
        encode = msgspec.json.encode if topic.codec == "json" else msgspec.msgpack.encode
        return encode({"type": self.name("unknown", tag)})

    def request_id(self, request_id: str) -> str:
        """A request id."""
        return self.request_id_of(id_hash(request_id))

    def request_id_of(self, hashed: int) -> str:
        """A request id of which only the `id_hash` is known, which is all that a snapshot keeps of those that ended."""
        return f"request-{hex_digest(self._ids.of(hashed))}"

    def tie_seed(self, partition: int, offset: int, number: int) -> int:
        """For the request at an offset of a partition, the seed that is tried as number `number`."""
        data = _PLACE.pack(partition, offset, number)
        return int.from_bytes(blake2b(data, key=self._key, person=b"tie seed", digest_size=8).digest(), "little")


class Pairs:
    """Hashes of 64 bits, and what stands for each: 16 bytes a pair. What was added is found after `seal`."""

    def __init__(self) -> None:
        # In buckets by the first bits, as sorting makes an object of each number in one.
        self._buckets = [(array("Q"), array("Q")) for _ in range(1 << _BUCKET_BITS)]

    def add(self, number: int, stand_in: int) -> None:
        """What stands for a number; the same again is no matter."""
        numbers, stand_ins = self._bucket(number)
        numbers.append(number)
        stand_ins.append(stand_in)

    def seal(self) -> None:
        """No more are added."""
        for numbers, stand_ins in self._buckets:
            pairs = sorted(zip(numbers, stand_ins, strict=True))
            numbers[:] = array("Q", (number for number, _ in pairs))
            stand_ins[:] = array("Q", (stand_in for _, stand_in in pairs))

    def get(self, number: int) -> int | None:
        """What stands for a number; None for one that was not added."""
        numbers, stand_ins = self._bucket(number)
        at = bisect_left(numbers, number)
        return stand_ins[at] if at < len(numbers) and numbers[at] == number else None

    def _bucket(self, number: int) -> "tuple[array[int], array[int]]":
        return self._buckets[number >> (64 - _BUCKET_BITS)]
