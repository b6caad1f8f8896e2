"""Signed records of the Kafka API: who sent them, which ones are rejected, and the limits of their keys."""

from hashlib import sha256
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.keys import KeySet
from forebay.events.requests import RequestSubmitted
from forebay.events.signing import KEY, TIME, is_signed_by, sign
from forebay.ingress.api_keys import ApiKeys
from forebay.ingress.errors import ApiError
from forebay.ingress.kafka_api.request import SIGNATURE_MS, signer
from forebay.ingress.openai.nvext import ROUTING_HEADERS
from forebay.transport.base import Record
from tests.ingress.conftest import Scene
from tests.ingress.fake_kafka import AT_MS, BODY, NAMESPACE, FakeKafka, record
from tests.ingress.keyed import key_of, keyed
from tests.system import until

TOPIC = f"{NAMESPACE}.openai-requests"


def private_key(tenant: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(sha256(tenant.encode()).digest())


def signing_key(tenant: str = "acme", **fields: Any) -> KeySet:
    public = private_key(tenant).public_key().public_bytes_raw()
    return key_of(tenant, key_hash=sha256(public).hexdigest(), public_key=public.hex(), **fields)


def signed(
    body: Any = BODY,
    place: tuple[int, int] = (3, 41),
    *,
    tenant: str = "acme",
    topic: str = TOPIC,
    time_ms: int = AT_MS,
    **headers: str,
) -> Record:
    unsigned = record(body, place, **{"request_id": "order-7", **headers})
    pem = private_key(tenant).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    named = sign(pem, topic, unsigned.headers or {}, unsigned.value, time_ms)
    return msgspec.structs.replace(unsigned, headers=named)


def changed(one: Record, **headers: str) -> Record:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return msgspec.structs.replace(one, headers={**(one.headers or {}), **named})


class Keys(ApiKeys):
    """Keys without a log."""

    def __init__(self, *events: KeySet) -> None:
        self._ids = {event.key_id: event for event in events}

    def find_id(self, key_id: str) -> KeySet | None:
        return self._ids.get(key_id)


BETA = signing_key("beta")
KEYS = Keys(signing_key(), BETA, key_of("bearer"))


def test_headers_that_change_a_request_are_signed() -> None:
    public = private_key("acme").public_key().public_bytes_raw()
    for name in (*ROUTING_HEADERS, "path", "reply-topic", "request-id", KEY, TIME):
        one = changed(signed(), **{name: "changed"})
        assert not is_signed_by(public, TOPIC, one.headers or {}, one.value), name
    assert is_signed_by(public, TOPIC, changed(signed(), traceparent="added").headers or {}, signed().value)


@pytest.mark.parametrize("is_required", [False, True])
def test_a_signature_names_the_tenant(*, is_required: bool) -> None:
    for at_ms in (AT_MS - SIGNATURE_MS, AT_MS + SIGNATURE_MS):
        caller = signer(signed(time_ms=at_ms), TOPIC, KEYS, is_required=is_required)
        assert (caller.tenant, caller.key) == ("acme", signing_key())


@pytest.mark.parametrize(
    ("one", "code", "text"),
    [
        (
            changed(signed(), forebay_key=BETA.key_id),
            "invalid_signature",
            "the signature is not that of",
        ),
        (signed(tenant="nobody"), "invalid_signature", "is unknown; `forebay keys list`"),
        (changed(signed(), forebay_key=key_of("bearer").key_id), "invalid_signature", "is not a key that signs"),
        (changed(signed(), path="/v1/embeddings"), "invalid_signature", f"for these headers and this value on {TOPIC}"),
        (changed(signed(), forebay_signature="bm8="), "invalid_signature", "the signature is not that of"),
        (signed(topic="other.openai-requests"), "invalid_signature", "the signature is not that of"),
        (msgspec.structs.replace(signed(), value=b"{}"), "invalid_signature", "the signature is not that of"),
        (record(request_id="a", forebay_time="1"), "invalid_signature", "a signed record needs the header forebay-key"),
        (changed(record(), **(signed().headers or {}), request_id="b"), "invalid_signature", "the signature is not"),
        (changed(signed(), forebay_key="fb-secret"), "api_key_in_header", "must be the id of a key, 12 hex digits"),
        (record(Authorization="Bearer fb-secret"), "api_key_in_header", "the record has the header authorization"),
        (changed(signed(), x_api_key="fb-secret"), "api_key_in_header", "the record has the header x-api-key"),
        (signed(time_ms=AT_MS - SIGNATURE_MS - 1), "signature_expired", f"must be within 60,000 ms of .* {AT_MS};"),
        (signed(time_ms=AT_MS + SIGNATURE_MS + 1), "signature_expired", "sign a record again"),
        (signed(time_ms=-1), "signature_expired", "forebay-time is '-1'"),
        (msgspec.structs.replace(signed(), is_stamped=False), "untrusted_timestamps", "LogAppendTime"),
    ],
)
def test_a_record_with_an_invalid_signature_is_rejected(one: Record, code: str, text: str) -> None:
    with pytest.raises(ApiError, match=text) as caught:
        signer(one, TOPIC, KEYS, is_required=False)
    assert caught.value.code == code
    assert caught.value.status == (501 if code == "untrusted_timestamps" else 401)
    assert "secret" not in str(caught.value)


def test_a_signed_record_needs_a_request_id() -> None:
    """Otherwise each copy of the record would be another request."""
    with pytest.raises(ApiError, match="a signed record needs the header request-id"):
        signer(msgspec.structs.replace(signed(), headers=without_id(signed())), TOPIC, KEYS, is_required=False)


def without_id(one: Record) -> dict[str, str]:
    return {name: text for name, text in (one.headers or {}).items() if name != "request-id"}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"revoked_us": 1}, "api_key_revoked"),
        ({"expires_us": AT_MS * 1000}, "api_key_expired"),
        ({"expires_us": AT_MS * 1000 + 1}, ""),
    ],
)
def test_a_key_expires_by_the_time_of_the_broker(fields: dict[str, Any], code: str) -> None:
    """So another ingress comes to the same result later."""
    try:
        found = signer(signed(), TOPIC, Keys(signing_key(**fields)), is_required=True).tenant
    except ApiError as error:
        found = error.code
    assert found == (code or "acme")


texts = st.text(st.characters(codec="utf-8"), max_size=20)
values = texts | st.sampled_from([*(signed().headers or {}).values(), key_of("bearer").key_id])
headers = st.dictionaries(texts | st.sampled_from([*(signed().headers or {}), "authorization"]), values)


@given(headers=headers, base=st.booleans(), value=st.binary(max_size=9), is_required=st.booleans())
def test_any_headers_are_accepted_or_rejected_with_one_error(
    *, headers: dict[str, str], base: bool, value: bytes, is_required: bool
) -> None:
    named = {**((signed().headers or {}) if base else {}), **headers}
    one = msgspec.structs.replace(signed(), headers=named, value=value)
    try:
        caller = signer(one, TOPIC, KEYS, is_required=is_required)
    except ApiError as error:
        assert error.status == 401
    else:
        assert not caller.tenant
        assert not is_required


def outcome(reply: Any) -> tuple[str, str]:
    return reply.headers["status"], msgspec.json.decode(reply.value)["error"]["code"]


def malformed(fake: FakeKafka) -> dict[str, float]:
    """Return the number of malformed records by the code of the error."""
    (family,) = fake.metrics.malformed.collect()
    return {one.labels["reason"]: one.value for one in family.samples if one.name.endswith("_total")}


def known(scene: Scene, key: KeySet) -> KeySet:
    """Return the newest event of a key at the ingress."""
    found = scene.front.keys.find_id(key.key_id)
    assert found is not None
    return found


async def test_the_tenant_of_a_signed_record_is_on_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    key = signing_key(weight=3, queue_classes=("batch",))
    async with keyed(key, require_key=True) as (scene, book):
        fake = FakeKafka(scene, monkeypatch)
        async with fake.serving() as serving:
            fake.append(signed(place=(3, 0)))
            request = await scene.next_request()
            assert (request.tenant, request.key_id, request.weight) == ("acme", key.key_id, 3)
            assert (request.cache_namespace, request.routing.policy_class) == ("tenant/acme", "batch")
            scene.reply(request.request_id, "the river")
            await until(lambda: fake.responses or serving.done())
            assert fake.responses[0].headers["status"] == "200"
            await book.set(msgspec.structs.replace(key, models=("another",)))
            await until(lambda: bool(known(scene, key).models))
            fake.append(signed(place=(3, 1)))
            await fake.start_request(BODY)
            await until(lambda: len(fake.responses) == 3 or serving.done())
            await book.set(msgspec.structs.replace(key, revoked_us=1))
            await until(lambda: bool(known(scene, key).revoked_us))
            fake.append(signed(place=(3, 3)))
            await until(lambda: len(fake.responses) == 4 or serving.done())
        assert [outcome(reply) for reply in fake.responses[1:]] == [
            ("404", "model_not_found"),
            ("401", "invalid_signature"),
            ("401", "api_key_revoked"),
        ]
        assert len(scene.requests(RequestSubmitted)) == 1
        assert malformed(fake) == {"model_not_found": 1, "invalid_signature": 1, "api_key_revoked": 1}


async def test_without_required_keys_unsigned_records_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keyed(signing_key()) as (scene, _):
        fake = FakeKafka(scene, monkeypatch)
        async with fake.serving():
            await fake.start_request(BODY)
            assert (await scene.next_request()).tenant == ""


async def test_a_key_that_signs_is_no_api_key_of_http() -> None:
    """Its hash is that of the public key, which is no secret."""
    key = signing_key()
    async with keyed(key) as (scene, _):
        raw = bytes.fromhex(key.public_key)
        response = await scene.client.get("/v1/models", headers=[(b"x-api-key", raw)])
        assert response.status_code == 401


async def test_the_limits_of_a_key_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    async with keyed(signing_key(requests_per_minute=2, in_flight=1, tokens_per_minute=150)) as (scene, _):
        fake = FakeKafka(scene, monkeypatch)

        async def responses(count: int) -> list[Any]:
            await until(lambda: len(fake.responses) >= count or serving.done())
            return fake.responses[count - 1 :]

        def send(request_id: str, **fields: Any) -> None:
            fake.append(signed({**BODY, "max_tokens": 40, **fields}, (3, len(fake.records)), request_id=request_id))

        async with fake.serving() as serving:
            send("a", n=2)
            first, second = await scene.next_request(), await scene.next_request()
            send("b")
            (limited,) = await responses(1)
            assert outcome(limited) == ("429", "in_flight_limit")
            scene.refuse(first.request_id, 503, "no_worker")
            assert outcome((await responses(2))[0]) == ("503", "no_worker"), "it counts nothing"
            for count, tokens in ((3, 40), (4, 100)):  # of the tokens, only those of the answer count
                send(f"r{count}", max_tokens=tokens)
                request = await scene.next_request()
                scene.reply(request.request_id, "the river")
                await responses(count)
            send("e")
            (limited,) = await responses(5)
            assert outcome(limited) == ("429", "rate_limit_exceeded")
            assert int(limited.headers["retry-after"]) > 1
            send("f", max_tokens=500)
            assert outcome((await responses(6))[0]) == ("400", "limit_exceeded")
        assert second.request_id != first.request_id
        assert len(scene.requests(RequestSubmitted)) == 4
        assert malformed(fake) == {}, "they are valid"


def ends(fake: FakeKafka) -> dict[bytes, str]:
    """Return the status of each complete response by its key."""
    return {reply.key: reply.headers["status"] for reply in fake.responses if reply.headers["last"] == "1"}


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_takeover_neither_rejects_a_request_nor_admits_a_rejected_one(
    monkeypatch: pytest.MonkeyPatch, *, has_begun: bool
) -> None:
    async with keyed(signing_key(tokens_per_minute=80)) as (scene, _):
        before = FakeKafka(scene, monkeypatch)
        async with before.serving() as serving:
            body = {**BODY, "stream": True, "max_tokens": 40}
            before.append(signed(body, (3, 0), request_id="a"))
            before.append(signed(body, (3, 1), request_id="b"))
            request = await scene.next_request()
            if has_begun:
                scene.emit_text(request.request_id, "one")
            await until(lambda: len(before.responses) == 1 + has_begun or serving.done())
        assert "429" in {reply.headers["status"] for reply in before.responses}
        after = FakeKafka(scene, monkeypatch, before.records)
        async with after.serving() as serving:
            await until(lambda: len(scene.requests(RequestSubmitted)) == 2 or serving.done())
            scene.end(request.request_id, output=int(has_begun))
            await until(lambda: len(ends(after)) == 2 or serving.done())
        assert ends(after) == {b"a": "200", b"b": "429"}
        assert {one.nonce for one in scene.requests(RequestSubmitted)} == {request.nonce}
