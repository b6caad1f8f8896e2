"""Packed lists, digests, model cards, privacy rules, ids of requests, summaries and versions of events."""

from collections.abc import Callable
from typing import Annotated, Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.answers import AnswerChunk, AnswerDeleted
from forebay.events.base import (
    Count,
    Event,
    Name,
    hex_digest,
    pack_u32,
    pack_u64,
    require_packed,
    unpack_u32,
    unpack_u64,
)
from forebay.events.fleet import IngressFact, IngressJoined, IngressLost, WorkerFact, WorkerLost
from forebay.events.keys import KeySet
from forebay.events.media import Encoded
from forebay.events.models import AliasSet, AliasTarget, FileChunk, ModelCard, ModelFile
from forebay.events.privacy import DROPPED, KEPT, LORA, REQUEST_ID, privacy_rules
from forebay.events.progress import (
    AnyProgressEvent,
    EncodeFinished,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    ProgressEvent,
    RequestFinished,
    RequestProgress,
)
from forebay.events.request_ids import (
    RequestLocation,
    aliases_of,
    client_id_of,
    http_request_id,
    kafka_api_request_id,
    log_id_of,
    parse_public_id,
    part_id,
    part_ids,
    public_id,
    whole_id,
)
from forebay.events.topics import INPUTS
from forebay.events.transfer import Prefilled
from forebay.events.versions import CALLS_SINCE, EVENTS_VERSION, PLACEMENT_SINCE, TENANTS_SINCE, may_write
from tests.harness.event_schemas import TOPICS
from tests.harness.samples import event_types


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_packed_lists_round_trip(values: list[int]) -> None:
    assert unpack_u64(pack_u64(values)) == values
    halves = [value >> 32 for value in values]
    assert unpack_u32(pack_u32(halves)) == halves


def test_packed_lists_are_little_endian() -> None:
    assert pack_u32([1, 0x01020304]).hex() == "01000000" + "04030201"
    assert pack_u64([0x0102030405060708]).hex() == "0807060504030201"


@pytest.mark.parametrize(("pack", "value"), [(pack_u32, -1), (pack_u32, 2**32), (pack_u64, -1), (pack_u64, 2**64)])
def test_values_out_of_range_are_rejected(pack: Callable[[list[int]], bytes], value: int) -> None:
    with pytest.raises(OverflowError):
        pack([value])


def test_partial_integers_are_rejected() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_u32(b"\0" * 5)
    with pytest.raises(ValueError, match="multiple"):
        unpack_u64(b"\0" * 12)
    with pytest.raises(ValueError, match="token_ids: 5 bytes"):
        require_packed("token_ids", b"\0" * 5, 4)


def test_a_digest_is_sixteen_hex_digits_of_the_low_64_bits() -> None:
    assert hex_digest(0) == "0" * 16
    assert hex_digest(2**64 - 1) == "f" * 16
    assert hex_digest(2**64 + 255) == "00000000000000ff"


# Model cards and aliases


SHAS = st.sampled_from(["0" * 64, "a" * 64])
FILES = st.builds(ModelFile, name=st.sampled_from(["a.json", "b.json"]), sha256=SHAS, size=st.integers(0, 2))
CARDS = st.builds(ModelCard, files=st.lists(FILES, max_size=2).map(tuple), context_tokens=st.integers(0, 2))


@given(CARDS, CARDS)
def test_equal_cards_have_equal_digests_and_others_do_not(first: ModelCard, second: ModelCard) -> None:
    assert (first.digest() == second.digest()) == (first == second)
    assert len(first.digest()) == 64


@given(CARDS)
def test_the_revision_does_not_change_the_digest(card: ModelCard) -> None:
    assert msgspec.structs.replace(card, revision="1f0c").digest() == card.digest()
    assert msgspec.structs.replace(card, dtype="bfloat16").digest() != card.digest()


def test_a_key_is_named_by_the_beginning_of_its_hash() -> None:
    key = KeySet(key_hash="0123456789ab" + "c" * 52, tenant="acme")
    assert (key.key_id, key.key) == ("0123456789ab", key.key_hash.encode())


def test_the_key_of_an_alias_differs_from_that_of_a_card() -> None:
    alias = AliasSet(alias="prod", targets=(AliasTarget(model="m"),))
    assert alias.key == b"alias/prod"


# Privacy rules


@pytest.mark.parametrize(
    "kind", [*get_args(AnyProgressEvent), IngressJoined, IngressLost, WorkerLost, WorkerFact, IngressFact]
)
def test_every_text_field_has_a_rule(kind: type[msgspec.Struct]) -> None:
    assert privacy_rules(kind)


@pytest.mark.parametrize("kind", get_args(RequestProgress))
def test_request_ids_are_masked_and_errors_are_dropped(kind: type[msgspec.Struct]) -> None:
    rules = privacy_rules(kind)
    assert rules["request_id"] == "request_id"
    assert rules.get("error", "drop") == "drop"
    assert "worker_id" not in rules


def test_rules_of_parts_are_found_through_the_event() -> None:
    assert privacy_rules(PrefillFinished)["prefilled"] == "nested"
    assert privacy_rules(Encoded) == {"descriptor": "drop", "checksum": "checksum", "metadata": "drop"}


@pytest.mark.parametrize("kind", [str, bytes, str | None, tuple[str, ...], dict[str, int], list[str]])
def test_a_field_that_may_hold_text_needs_a_rule(kind: Any) -> None:
    Leaky = msgspec.defstruct("Leaky", [("count", Count), ("comment", kind)])  # noqa: N806 - a class

    with pytest.raises(TypeError, match="field comment of Leaky has no privacy rule"):
        privacy_rules(Leaky)


def test_rules_apply_to_optional_and_repeated_fields() -> None:
    class Full(msgspec.Struct):
        kept: Annotated[Name, KEPT]
        text: Annotated[Name, msgspec.Meta(max_length=9), DROPPED] | None
        adapters: Annotated[tuple[Name, ...], LORA]
        ids: tuple[Annotated[Name, REQUEST_ID], ...]
        parts: tuple[Encoded, ...]
        none: int | None

    expected = {"text": "drop", "adapters": "lora", "ids": "request_id", "parts": "nested"}
    assert privacy_rules(Full) == expected


# Ids of requests on the log, and the ids by which clients find them


HTTP, KAFKA = http_request_id("order-7", 0xABC), kafka_api_request_id("order-7")


def test_the_id_of_the_client_is_part_of_the_unique_id() -> None:
    assert (HTTP, KAFKA) == ("order-7~0000000000000abc", "order-7~kafka")


def test_a_public_id_contains_the_location_of_its_request() -> None:
    public = public_id(part_id(HTTP, 1), RequestLocation(3, 0x1F4))
    assert public == "order-7~0000000000000abc-1~3.1f4"
    assert parse_public_id(public) == (part_id(HTTP, 1), RequestLocation(3, 0x1F4))
    assert parse_public_id(HTTP) == (HTTP, None)
    assert client_id_of(public) == "order-7"
    assert (log_id_of(public), whole_id(part_id(HTTP, 0), 2), whole_id(HTTP, 1)) == (part_id(HTTP, 1), HTTP, HTTP)


def test_each_piece_of_an_upload_has_its_own_key() -> None:
    chunk = FileChunk(sha256="0" * 64, upload="u", index=2, data=b"")
    assert chunk.key == f"{'0' * 64}/u/2".encode()


def test_keys_of_the_records_of_an_answer() -> None:
    deleted = AnswerDeleted(request_id=HTTP, partition=3, offset=0x1F4)
    chunk = AnswerChunk(upload="u", index=2, data=b"")
    assert (deleted.key, chunk.key) == (b"3.1f4", b"u/2")


@pytest.mark.parametrize("whole", [HTTP, KAFKA])
def test_a_part_is_found_by_its_id_and_that_of_the_whole_request(whole: str) -> None:
    assert part_ids(whole, 1) == [whole]
    assert aliases_of(whole) == {whole, "order-7"}
    assert client_id_of(whole) == "order-7"
    assert part_ids(whole, 2) == [f"{whole}-0", f"{whole}-1"]
    assert aliases_of(f"{whole}-12") == {f"{whole}-12", whole, "order-7"}
    assert client_id_of(f"{whole}-12") == "order-7"


def test_an_id_without_a_client_is_found_by_itself() -> None:
    assert aliases_of("order-7") == {"order-7"}
    assert client_id_of("chatcmpl-1-0") == "chatcmpl-1-0"


# Summaries of progress events


COMMON: dict[str, Any] = {"request_id": "r", "attempt": 1, "worker_id": "w", "worker_epoch": 7, "owner_epoch": 0}
ENCODED = Encoded(descriptor=b"", shape=(576, 4096), dtype="bfloat16", checksum="0" * 16)
PREFILLED = Prefilled(
    worker_id="w", worker_epoch=7, model="m", connector="tcp", descriptor=b"", tokens=12_000, lease_us=2_500_000
)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (OutputGrown(**COMMON, output_tokens=64), "64 tokens"),
        (RequestFinished(**COMMON, finish_reason="stop"), "finished (stop)"),
        (PrefillFailed(**COMMON, error="too long"), "prefill failed (too long)"),
        (EncodeFinished(**COMMON, encoded=ENCODED), "images and videos encoded as 576 x 4096 bfloat16"),
        (PrefillFinished(**COMMON, prefilled=PREFILLED), "prefill finished, KV of 12,000 tokens kept for 2.5 s"),
    ],
)
def test_a_summary_shows_fields(event: ProgressEvent, text: str) -> None:
    assert event.SUMMARY.format(event) == text


@pytest.mark.parametrize("kind", get_args(RequestProgress))
def test_every_progress_event_has_a_summary(kind: type[ProgressEvent]) -> None:
    assert kind.SUMMARY


# Versions of event types


TYPES = [kind for topic in TOPICS for kind in event_types(topic)]


class Added(Event, tag="test.added", frozen=True):
    SINCE = 3


def test_a_type_is_written_if_the_owner_has_its_version_or_a_later_one() -> None:
    assert [may_write(Added, owner_events) for owner_events in (1, 2, 3, 4)] == [False, False, True, True]
    assert may_write(Event, 1)


def test_the_version_grows_with_each_added_type() -> None:
    assert sorted({TENANTS_SINCE, PLACEMENT_SINCE, CALLS_SINCE, *(kind.SINCE for kind in TYPES)}) == list(
        range(1, EVENTS_VERSION + 1)
    )
    first = [kind for topic in INPUTS for kind in event_types(topic) if kind.SINCE == 1]
    assert len(first) == 39, "a new event that the owner reads sets SINCE = EVENTS_VERSION + 1, see CONTRIBUTING.md"
