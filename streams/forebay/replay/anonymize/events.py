"""Anonymise events. Lengths, times, structure and the names of the system's own components stay the same.

Theory of operation. An event class declares for each field how the field is anonymised (`forebay.events.privacy`), so
no new type or field can be forgotten. Prompts, texts and sampling seeds are dropped. Request IDs, sessions, adapters,
cache namespaces and sequence hashes are masked. The name of a worker, taint, model or queue class that a client uses is
masked unless the system has a component of that name.

Sequence hashes are public functions of the tokens, so a short block could be guessed. Masks are keyed BLAKE2 hashes
whose key is discarded. Equal values stay equal, and different ones collide as rarely as sequence hashes. Snapshots
identify requests and sessions by hashes, whose replacements are computed, or looked up in tables built from the log.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from forebay.core.adapter_placement import UNLOAD
from forebay.core.state.commands import LAST_READY, RESPONSE_OMITTED, TIMED_OUT, WORKER_LOST
from forebay.core.state.sessions import session_key
from forebay.core.state.submitted_request import content_hash, id_hash
from forebay.events.base import CHECKSUM_DIGITS, U64_BYTES, hex_digest, pack_u64, unpack_u64
from forebay.events.codec import unknown_tag
from forebay.events.control import PoolConfigured
from forebay.events.decisions import AdapterPlaced
from forebay.events.fleet import WorkerSpec
from forebay.events.media import Media
from forebay.events.privacy import Rule, privacy_rules
from forebay.events.requests import RequestSubmitted
from forebay.events.snapshots import Remembered
from forebay.events.topics import Topic

KEY_BYTES = 32
REMEMBERED = 1 << 16  # masked numbers, about 13 MB; prefixes recur often
NO_RECORD = b"\xc1"  # neither JSON nor MessagePack has this byte
MASKED_NAMES = ("lora", "ingress", "owner", "lease", "session", "namespace", "tenant", "path")
CLIENT_NAMES = ("worker", "taint", "model", "pool", "class")  # masked unless the system has a component of that name
OWNER_TEXTS = (WORKER_LOST, TIMED_OUT, RESPONSE_OMITTED, LAST_READY)  # outcomes in the owner's own words

replace = msgspec.structs.replace
T = TypeVar("T", bound=msgspec.Struct)


class EventAnonymizer:
    """Anonymises the events of one group with a key of `KEY_BYTES` bytes. Names of the system's components stay."""

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES
        self._key = key
        self._names: defaultdict[str, set[str]] = defaultdict(set)  # of the system's components, by kind
        self._contents: dict[int, int] = {}
        self._sessions: dict[int, int] = {}
        self._ordered_ids: dict[int, str] = {}  # by `id_hash`
        self.number = lru_cache(maxsize=REMEMBERED)(self._number)
        self._masked: dict[Rule, Callable[[Any], Any]] = {
            "nested": self.anonymize,
            "drop": lambda value: type(value)(),
            "unset": lambda _: None,
            "zero": lambda _: 0,
            "outcome": lambda text: text if text in OWNER_TEXTS else "",
            "checksum": lambda _: hex_digest(0),
            "chunks": lambda _: "0" * CHECKSUM_DIGITS,
            "sha256": lambda digest: self._digest("sha256", bytes.fromhex(digest), 32).hex(),
            "request_id": lambda request_id: self._request_id(id_hash(request_id)),
            "request_hashes": partial(_map_packed, lambda hashed: id_hash(self._request_id(hashed))),
            "content": self._content,
            "contents": partial(_map_packed, self._content),
            "nonce": self._nonce,
            "idempotency_key": self._idempotency_key,
            "idempotency_keys": partial(_map_packed, self._idempotency_key),
            "session_keys": partial(_map_packed, lambda key: self._sessions.get(key) or self.number("session", key)),
            "hash": self._parent_hash,
            "hashes": partial(_map_packed, partial(self.number, "blocks")),
            "state_digest": lambda digest: hex_digest(self.number("digest", int(digest, 16))),
        }
        self._masked |= {kind: partial(self.name, kind) for kind in MASKED_NAMES}
        self._masked |= {kind: partial(self._client_name, kind) for kind in CLIENT_NAMES}

    def learn_worker(self, spec: WorkerSpec) -> None:
        self._names["worker"].add(spec.worker_id)
        self._names["taint"].update(spec.taints)

    def learn_pool(self, pool: PoolConfigured) -> None:
        self._names["model"].add(pool.model)
        self._names["pool"].add(pool.pool)
        self._names["class"].update(one.name for one in pool.router.queue.classes)

    def learn_placement(self, event: AdapterPlaced) -> None:
        """Keep the ids of the owner's own commands, because they follow from the journal."""
        for command_id in (event.command_id, event.command_id + UNLOAD):
            self._ordered_ids[id_hash(command_id)] = command_id

    def learn_request(self, event: RequestSubmitted) -> None:
        """Note the hashes by which snapshots refer to a request. Call this after all names have been learned."""
        masked = self.anonymize(event)
        self._contents[content_hash(event)] = content_hash(masked)
        if event.routing.session_id:
            for pool in self._names["pool"]:
                key, stand_in = (session_key(pool, one.routing.session_id) for one in (event, masked))
                self._sessions[key] = stand_in

    def keep_order(self, request_ids: set[str]) -> None:
        """Choose the masks of these IDs so that the masks sort like the IDs.

        This keeps the order of decisions, because the owner aborts requests with equal deadlines in the order of IDs.
        """
        hashes = list(map(id_hash, sorted(request_ids)))
        self._ordered_ids |= dict(zip(hashes, sorted(map(self._request_id, hashes)), strict=True))

    def anonymize(self, value: T) -> T:
        """Return a copy of an event, a journal record or a part, whose fields are anonymised by the rules of its class.

        The digests of a journal record are masked, not derived again. The nonce replaces the content of a request, so
        repeated submissions of the same content stay equal.
        """
        rules = privacy_rules(type(value))
        if not rules:
            return value
        masked = replace(value, **{name: self._field(rule, getattr(value, name)) for name, rule in rules.items()})
        match value:
            case RequestSubmitted():
                nonce = self.number("content", content_hash(value))
                return replace(masked, nonce=nonce, withheld_tokens=value.prompt_tokens)
            case Media():
                return replace(masked, mime=f"{value.kind}/*")
            case Remembered(commands=True):
                return replace(masked, contents=_map_packed(self._nonce, value.contents))
            case _:
                return masked

    def undecodable(self, topic: Topic, value: bytes) -> bytes:
        """Return a replacement that fails to decode for the same reason as `value`, without data of the original."""
        tag = None if topic.events is None else unknown_tag(topic, value)
        if tag is None:
            return NO_RECORD
        encode = msgspec.json.encode if topic.codec == "json" else msgspec.msgpack.encode
        return encode({"type": self.name("unknown", tag)})

    def name(self, kind: str, name: str) -> str:
        """Return the mask of a name: `kind` (up to 16 ASCII characters) and 64 bits in hex. Return "" for ""."""
        return f"{kind}-{self._digest(kind, name.encode()).hex()}" if name else ""

    def _number(self, kind: str, value: int) -> int:
        """Return the mask of a 64-bit number. `kind` separates the masks of one key."""
        return int.from_bytes(self._digest(kind, value.to_bytes(U64_BYTES, "little")), "little")

    def _digest(self, kind: str, value: bytes, size: int = U64_BYTES) -> bytes:
        return blake2b(value, key=self._key, person=kind.encode(), digest_size=size).digest()

    def _field(self, rule: Rule, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, tuple):
            return tuple(self._field(rule, one) for one in value)
        return self._masked[rule](value)

    def _request_id(self, hashed: int) -> str:
        """Return the masked request ID for the `id_hash` of an ID. Snapshots hold only this hash of ended requests."""
        return self._ordered_ids.get(hashed) or f"request-{hex_digest(self.number('id', hashed))}"

    def _client_name(self, kind: str, name: str) -> str:
        return name if name in self._names[kind] else self.name(kind, name)

    def _nonce(self, nonce: int) -> int:
        """Return the masked nonce of a command, which fits a `Count`; 0 for the owner's own commands."""
        return self.number("content", nonce) >> 1 if nonce else 0

    def _idempotency_key(self, key: int) -> int:
        return self.number("key", key) if key else 0

    def _parent_hash(self, parent: int) -> int:
        """Return a masked hash, or -1 for a number that is no hash."""
        return self.number("blocks", parent) if 0 <= parent < 1 << 64 else -1

    def _content(self, content: int) -> int:
        known = self._contents.get(content)
        return self.number("content", content) if known is None else known


def _map_packed(mask: Callable[[int], int], packed: bytes) -> bytes:
    return pack_u64(map(mask, unpack_u64(packed)))
