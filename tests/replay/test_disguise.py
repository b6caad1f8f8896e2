"""Anonymisation of every event type removes client content and keeps system names, with masks that reveal nothing."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from forebay.core.state.submitted_request import content_hash, id_hash
from forebay.events.base import pack_u64, unpack_u64
from forebay.events.codec import DecodeError, decode, unknown_tag
from forebay.events.control import PoolConfigured, QueueConfig
from forebay.events.decisions import JournalRecord
from forebay.events.fleet import WorkerJoined, WorkerSpec
from forebay.events.pools import GridPool, PoolGrid
from forebay.events.requests import RequestSubmitted, RoutingHints, Sampling, TaintWeight, Task
from forebay.events.snapshots import Chunk, Remembered
from forebay.events.topics import FLEET, INPUTS, REQUESTS, Topic
from forebay.replay.anonymize.events import KEY_BYTES, EventAnonymizer

KEY = bytes(range(KEY_BYTES))
INPUT_EVENTS = [kind for topic in INPUTS for kind in get_args(topic.events)]
RECORDS = get_args(JournalRecord)
PARTS = get_args(Chunk)

# System texts by struct and field. "*" is any struct except `RoutingHints`, which clients write.
KEPT = {
    ("OwnerClaimed", "release"),
    ("*", "owner_nonce"),
    ("OwnerClaimed", "previous_nonce"),
    ("*", "snapshot_id"),
    ("*", "worker_id"),
    ("*", "pool"),
    ("*", "tier"),
    ("*", "mode"),
    ("OwnerClaimed", "policies"),
    ("WorldState", "owner_policies"),
    ("PoolPolicy", "configured"),
    ("*", "phase"),
    ("WorkerSpec", "endpoints"),
    ("*", "reason"),  # of a decision, from a fixed list
    ("*", "table_digest"),
    ("*", "queue_class"),
    ("*", "topic"),
    ("Encoded", "dtype"),
    ("KvLayout", "dtype"),
    ("*", "connector"),
    ("Prefilled", "model"),
    ("Rendering", "card"),
    ("Rendering", "tool_parser"),
    ("Rendering", "reasoning_parser"),
    ("RequestState", "encoder_id"),
    ("RequestState", "prefiller_id"),
    ("RequestState", "decoder_id"),
    ("RequestState", "rejected_by"),
    ("RequestState", "prefill_pool"),
    ("PoolChoice", "wanted"),
    ("PoolChoice", "base"),
    ("PoolCanarySet", "base"),
    ("WorkerSpec", "model"),
    ("WorkerSpec", "engine"),
    ("WorkerSpec", "kv_store"),
    ("*", "store"),
    ("*", "endpoint"),
    ("RoutingHints", "endpoints"),
    ("EngineFailed", "engine"),
    ("WorkerSpec", "taints"),
    ("PoolConfigured", "model"),
    ("ClassDeficit", "name"),
    ("AdapterPlaced", "command_id"),
}
FREE_TEXTS = (  # like `reason`, but free text
    "WorkerSuspect",
    "WorkerRecovered",
    "WorkerDraining",
    "WorkerLost",
    "IngressLost",
    "RequestCancelled",
    "AdapterFailure",
)
HASHES = {"parent_hash", "nonce", "content", "seed", "idempotency_key", "body_hash", "end_user"}
TOKENS = {"replaced", "token_id", "stop_token_ids"}  # token ids of a client, or that the prompt of a client had
WITHHELD = {"token_ids", "content", "descriptor", "metadata"}  # packed, with a different length
NO_HASHES = {"due_us", "offsets"}  # packed numbers of the log


class Filled:
    """Creates structs with a value in every field and keeps the values that must not leak."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.secrets: list[bytes] = []
        self._count = 0

    def of(self, cls: type) -> Any:
        info = inspect.type_info(cls)
        assert isinstance(info, inspect.StructType)
        return self._struct(info)

    def _struct(self, info: inspect.StructType) -> Any:
        return info.cls(**{one.name: self._value(one.type, info.cls.__name__, one.name) for one in info.fields})

    def _value(self, info: inspect.Type, owner: str, name: str) -> Any:
        match info:
            case inspect.Metadata():
                return self._value(info.type, owner, name)
            case inspect.StructType() if info.cls is QueueConfig:
                return QueueConfig(threshold=0.5)  # its classes must be consistent
            case inspect.StructType() if info.cls is PoolGrid:
                name = self._text("PoolGrid", "pool")
                pools = (GridPool(pool=name, priority=1),)
                return PoolGrid(isl_max=9, target_max_ms=9.0, pools=pools, cells=((name,),))
            case inspect.StructType():
                return self._struct(info)
            case inspect.UnionType():
                some = next(one for one in info.types if not isinstance(one, inspect.NoneType))
                return self._value(some, owner, name)
            case inspect.VarTupleType():
                return (self._value(info.item_type, owner, name),)
            case inspect.LiteralType():
                return info.values[0]
            case inspect.StrType(pattern=None):
                return self._text(owner, name)
            case inspect.StrType():
                return "aa".zfill(info.max_length or 16)  # hexadecimal digits
            case inspect.BytesType():
                return self._packed(name)
            case inspect.IntType() if name in HASHES | TOKENS:
                return int.from_bytes(self._packed(name), "little")
            case inspect.IntType():
                return info.ge or 1
            case inspect.FloatType():
                return 0.5
            case inspect.BoolType():
                return True
        raise TypeError(f"nothing to fill {info} with")

    def _text(self, owner: str, name: str) -> str:
        self._count += 1
        theirs = (owner == "RoutingHints" and name not in ("endpoint", "endpoints")) or (
            name == "reason" and owner in FREE_TEXTS
        )
        theirs |= (owner, name) == ("WorkerCommanded", "pool")  # an operator may name a missing pool
        kept = not theirs and not KEPT.isdisjoint({(owner, name), ("*", name)})
        text = f"{'kept' if kept else 'SECRET'}-{self._count:04}"
        if kept:
            self.kept.append(text)
        else:
            self.secrets.append(text.encode())
        return text

    def _packed(self, name: str) -> bytes:
        self._count += 1
        number = 0x5EC2E70000000000 | self._count
        if name not in NO_HASHES:
            self.secrets += [number.to_bytes(8, "little"), number.to_bytes(8, "big"), f"{number:016x}".encode()]
        return pack_u64([number])


def anonymizer() -> EventAnonymizer:
    return EventAnonymizer(KEY)


@pytest.mark.parametrize("kind", [*INPUT_EVENTS, *RECORDS, *PARTS], ids=lambda kind: kind.__name__)
def test_no_client_content_is_left(kind: type) -> None:
    filled = Filled()
    event = filled.of(kind)
    anew = anonymizer().anonymize(event)
    encoded = msgspec.msgpack.encode(anew) + msgspec.json.encode(anew)
    assert [secret for secret in filled.secrets if secret in encoded] == []
    assert [text for text in filled.kept if text.encode() not in encoded] == []
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(anew), type=kind) == anew
    assert [name for name in numbers(event) if numbers(event)[name] != numbers(anew)[name]] == []


def numbers(event: Any) -> dict[str, Any]:
    """Return lengths, times and all other values that are neither text nor hashes, by path."""
    return dict(_numbers("", msgspec.structs.asdict(event)))


def _numbers(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    name = path.rstrip(".0123456789").rpartition(".")[2]
    match value:
        case dict():
            for key, one in value.items():
                yield from _numbers(f"{path}.{key}", one)
        case msgspec.Struct():
            yield from _numbers(path, msgspec.structs.asdict(value))
        case tuple():
            yield f"{path}#", len(value)
            for at, one in enumerate(value):
                yield from _numbers(f"{path}.{at}", one)
        case bytes() if name not in WITHHELD:
            yield path, len(value)
        case int() | float() | bool() if name not in HASHES | TOKENS | {"withheld_tokens", "reply_key"}:
            yield path, value
        case _:
            pass


def submitted(**hints: Any) -> RequestSubmitted:
    return RequestSubmitted(
        request_id="r",
        model="typed",
        token_ids=bytes(40),
        sequence_hashes=b"",
        reply_slot=1,
        timeout_us=1,
        tie_seed=1,
        sampling=Sampling(max_tokens=1, seed=7),
        routing=RoutingHints(**hints),
    )


def test_the_length_of_a_prompt_is_kept() -> None:
    anew = anonymizer().anonymize(submitted())
    assert (anew.prompt_tokens, anew.token_ids) == (10, b"")


@pytest.mark.parametrize("task", get_args(Task))
def test_task_of_a_request_is_kept(task: Task) -> None:
    event = msgspec.structs.replace(submitted(), task=task)
    assert anonymizer().anonymize(event).task == task


def test_a_nonce_is_not_a_hash_of_the_request() -> None:
    """A hash of the original or of the anonymised request could be guessed."""
    event = submitted()
    assert anonymizer().anonymize(event).nonce not in {event.nonce, content_hash(event)}


def test_system_names_in_client_fields_are_kept_and_free_text_is_masked() -> None:
    group = anonymizer()
    spec = WorkerSpec(
        worker_id="w1",
        model="m",
        block_size=4,
        kv_blocks_total=1,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        taints=("gpu",),
    )
    group.learn_worker(spec)
    group.learn_pool(PoolConfigured(pool="p", model="m", block_size=4))
    wishes = (TaintWeight(taint="gpu", weight=1.0), TaintWeight(taint="typed", weight=1.0))
    known = submitted(worker_id="w1", allowed_workers=("w1", "typed"), preferred_taints=wishes, policy_class="default")
    anew = group.anonymize(known)
    assert (anew.routing.worker_id, anew.routing.policy_class) == ("w1", "default")
    assert anew.routing.allowed_workers[0] == "w1"
    assert anew.routing.preferred_taints[0].taint == "gpu"
    assert b"typed" not in msgspec.msgpack.encode(anew)
    assert anew.model.startswith("model-")


def test_adapter_names_of_workers_and_requests_stay_equal() -> None:
    group = anonymizer()
    joined = Filled().of(WorkerJoined)
    joined = msgspec.structs.replace(joined, spec=msgspec.structs.replace(joined.spec, loras=("mine",)))
    anew = group.anonymize(joined)
    assert isinstance(anew, WorkerJoined)
    request = group.anonymize(msgspec.structs.replace(submitted(), lora_name="mine"))
    assert anew.spec.loras == (request.lora_name,)


U64 = st.integers(0, 2**64 - 1)


@given(st.lists(U64, unique=True, max_size=50))
def test_different_numbers_stay_different(values: list[int]) -> None:
    group = anonymizer()
    assert len({group.number("blocks", value) for value in values}) == len(values)


def test_every_kind_and_every_key_has_a_mask_of_its_own() -> None:
    groups = [EventAnonymizer(key) for key in (KEY, bytes(KEY_BYTES))]
    masks = {tuple(one.number(kind, at) for at in range(100)) for one in groups for kind in ("blocks", "session")}
    assert len(masks) == 4


def test_neighbours_are_separated() -> None:
    masked = [anonymizer().number("blocks", value) for value in range(2_001)]
    flipped = [(one ^ other).bit_count() for one, other in pairwise(masked)]
    assert 31 < sum(flipped) / len(flipped) < 33
    bits = Counter(bit for value in masked[:-1] for bit in range(64) if value >> bit & 1)
    assert all(850 < bits[bit] < 1_150 for bit in range(64))


@given(st.text(min_size=1), st.text(min_size=1))
def test_names_are_equal_if_the_originals_are(one: str, other: str) -> None:
    group = anonymizer()
    assert (group.name("session", one) == group.name("session", other)) == (one == other)
    assert group.name("session", one) != EventAnonymizer(bytes(KEY_BYTES)).name("session", one)
    first, second = (group.anonymize(msgspec.structs.replace(submitted(), request_id=name)) for name in (one, other))
    assert (first.request_id == second.request_id) == (one == other)


def test_a_snapshot_refers_to_the_masked_id_of_an_ended_request() -> None:
    group = anonymizer()
    group.keep_order({"late", "later"})
    for name in ("r", "late", "later"):
        event = group.anonymize(msgspec.structs.replace(submitted(), request_id=name))
        ended = group.anonymize(Remembered(ids=pack_u64([id_hash(name)]), contents=b"", due_us=b""))
        assert list(unpack_u64(ended.ids)) == [id_hash(event.request_id)]


def test_a_missing_name_stays_none() -> None:
    assert not anonymizer().name("lora", "")


@pytest.mark.parametrize("topic", [REQUESTS, FLEET], ids=lambda topic: topic.codec)
def test_undecodable_records_stay_undecodable_for_the_same_reason(topic: Topic) -> None:
    group = anonymizer()
    for value in (b"secret", b"", b"{}"):
        masked = group.undecodable(topic, value)
        assert unknown_tag(topic, masked) is None
        with pytest.raises(DecodeError):
            decode(topic, masked)
    codec = msgspec.json if topic.codec == "json" else msgspec.msgpack
    masked = group.undecodable(topic, codec.encode({"type": "secret.plan", "more": "secret"}))
    assert unknown_tag(topic, masked) is not None
    assert b"secret" not in masked
