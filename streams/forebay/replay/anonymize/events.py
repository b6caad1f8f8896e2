"""Anonymise events. Lengths, times, structure and the names of the system's own components stay the same.

Theory of operation. An event class declares for each field how the field is anonymised (`forebay.events.privacy`), so
no new type or field can be forgotten. Prompts, texts and sampling seeds are dropped. Request IDs, sessions, adapters,
cache namespaces and sequence hashes are masked. The name of a worker, taint, model or queue class that a client uses is
masked unless the system has a component of that name.

Snapshots identify requests and sessions by hashes. The replacements of these hashes are computed, or looked up in
tables built from the recording itself, so a snapshot and the events after it still refer to the same requests.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from forebay.core.state.commands import LAST_READY, RESPONSE_OMITTED, TIMED_OUT, WORKER_LOST
from forebay.core.state.submitted_request import content_hash, id_hash
from forebay.events.base import CHECKSUM_DIGITS, hex_digest, pack_u64, unpack_u64
from forebay.events.control import PoolConfigured
from forebay.events.fleet import WorkerSpec
from forebay.events.media import Media
from forebay.events.privacy import Rule, privacy_rules
from forebay.events.requests import RequestSubmitted
from forebay.events.snapshots import Remembered
from forebay.replay.anonymize.masks import Masks
from forebay.transport.base import Record

MASKED_NAMES = ("lora", "ingress", "owner", "lease", "session", "namespace", "path")
CLIENT_NAMES = ("worker", "taint", "model", "pool", "class")  # masked unless the system has a component of that name
OWNER_TEXTS = (WORKER_LOST, TIMED_OUT, RESPONSE_OMITTED, LAST_READY)  # outcomes in the owner's own words

replace = msgspec.structs.replace
T = TypeVar("T", bound=msgspec.Struct)


class EventAnonymizer:
    """Anonymises the events of one group. `names`, by kind, are names of the system's own components, which stay.

    `contents` and `sessions` have the replacement of each content hash and session key in the recording. `ordered_ids`
    has the masks of the request IDs passed to `keep_order`.
    """

    def __init__(self, masks: Masks, partition: int) -> None:
        self.masks = masks
        self.partition = partition
        self.names: defaultdict[str, set[str]] = defaultdict(set)
        self.contents: dict[int, int] = {}
        self.sessions: dict[int, int] = {}
        self.ordered_ids: dict[str, str] = {}
        self._ordered_hashes: dict[int, str] = {}
        self._masked: dict[Rule, Callable[[Any], Any]] = {
            "nested": self.anonymize,
            "drop": lambda value: type(value)(),
            "unset": lambda _: None,
            "zero": lambda _: 0,
            "outcome": lambda text: text if text in OWNER_TEXTS else "",
            "checksum": lambda _: hex_digest(0),
            "chunks": lambda _: "0" * CHECKSUM_DIGITS,
            "sha256": masks.sha256,
            "request_id": self.request_id,
            "request_hashes": partial(_map_packed, self._id_hash),
            "content": self._content,
            "contents": partial(_map_packed, self._content),
            "nonce": self._nonce,
            "session_keys": partial(_map_packed, self._session),
            "hash": self._parent_hash,
            "hashes": masks.blocks.packed,
            "state_digest": lambda digest: hex_digest(masks.digests.of(int(digest, 16))),
        }
        self._masked |= {kind: partial(masks.name, kind) for kind in MASKED_NAMES}
        self._masked |= {kind: partial(self._client_name, kind) for kind in CLIENT_NAMES}

    def learn_worker(self, spec: WorkerSpec) -> None:
        self.names["worker"].add(spec.worker_id)
        self.names["taint"].update(spec.taints)

    def learn_pool(self, pool: PoolConfigured) -> None:
        self.names["model"].add(pool.model)
        self.names["pool"].add(pool.pool)
        self.names["class"].update(one.name for one in pool.router.queue.classes)

    def keep_order(self, request_ids: set[str]) -> None:
        """Choose the masks of these IDs so that the masks sort like the IDs.

        This keeps the order of decisions, because the owner aborts requests with equal deadlines in the order of IDs.
        """
        masked = sorted(map(self.masks.request_id, request_ids))
        self.ordered_ids = dict(zip(sorted(request_ids), masked, strict=True))
        self._ordered_hashes = {id_hash(name): stand_in for name, stand_in in self.ordered_ids.items()}

    def request_id(self, request_id: str) -> str:
        return self.ordered_ids.get(request_id) or self.masks.request_id(request_id)

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
                nonce = self.masks.contents.of(content_hash(value))
                return replace(masked, nonce=nonce, withheld_tokens=value.prompt_tokens)
            case Media():
                return replace(masked, mime=f"{value.kind}/*")
            case Remembered(commands=True):
                return replace(masked, contents=_map_packed(self._nonce, value.contents))
            case _:
                return masked

    def _field(self, rule: Rule, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, tuple):
            return tuple(self._field(rule, one) for one in value)
        return self._masked[rule](value)

    def _client_name(self, kind: str, name: str) -> str:
        return name if name in self.names[kind] else self.masks.name(kind, name)

    def _nonce(self, nonce: int) -> int:
        """Return the masked nonce of a command, which fits a `Count`."""
        return self.masks.contents.of(nonce) >> 1

    def _parent_hash(self, parent: int) -> int:
        """Return a masked hash, or -1 for a number that is no hash."""
        return self.masks.blocks.of(parent) if 0 <= parent < 1 << 64 else -1

    def _id_hash(self, hashed: int) -> int:
        return id_hash(self._ordered_hashes.get(hashed) or self.masks.request_id_of(hashed))

    def _content(self, content: int) -> int:
        known = self.contents.get(content)
        return self.masks.contents.of(content) if known is None else known

    def _session(self, key: int) -> int:
        known = self.sessions.get(key)
        return self.masks.sessions.of(key) if known is None else known


def _map_packed(mask: Callable[[int], int], packed: bytes) -> bytes:
    return pack_u64(map(mask, unpack_u64(packed)))


def with_value(record: Record, value: bytes) -> Record:
    """Return a record with another value, without key and headers."""
    return Record(record.topic, record.partition, record.offset, record.at_us, value)
