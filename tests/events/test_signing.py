"""Signatures of records of the Kafka API: what they cover, and that verification raises no error."""

import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from forebay.events.signing import KEY, SIGNATURE, TIME, is_signed_by, message, sign

TOPIC = "forebay.openai-requests"
PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = PRIVATE.public_key().public_bytes_raw()
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key().public_bytes_raw()


def pem(key: Any, encryption: KeySerializationEncryption | None = None) -> bytes:
    encoded: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())
    return encoded


PEM = pem(PRIVATE)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
covered = st.sampled_from(["request-id", "path", "reply-topic", "x-dynamo-dp-rank", "X-Dynamo-Session-ID"])
names = covered | texts
records = st.tuples(texts, st.dictionaries(names, texts), st.binary(max_size=50))


def test_a_signature_does_not_change_between_versions() -> None:
    headers = {"request-id": "order-7", "path": "/v1/completions", "traceparent": "00-1"}
    signed = sign(PEM, TOPIC, headers, b'{"prompt": "Once"}', 1_700_000_000_000)
    assert message(TOPIC, signed, b"") == (
        b"\0\0\0\x14forebay-kafka-api-v1\0\0\0\x17forebay.openai-requests"
        b"\0\0\0\x20" + bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855") + b"\0\0\0"
        b"\x0bforebay-key\0\0\0\x0c56475aa75463\0\0\0\x0cforebay-time\0\0\0\x0d1700000000000"
        b"\0\0\0\x04path\0\0\0\x0f/v1/completions\0\0\0\x0arequest-id\0\0\0\x07order-7"
    )
    signature = "Bu/04oyuaLfZP35iWTkBzSgtqeEtLDRSa5+V/yoI9ZRff/Ir58jtcC6yAeXaM33KlWXjcqd8dJKDl3xHIluBBg=="
    assert signed == {**headers, KEY: "56475aa75463", TIME: "1700000000000", SIGNATURE: signature}


@given(record=records, other=records)
def test_two_records_have_the_same_message_only_if_they_do_the_same(record: Any, other: Any) -> None:
    def effect(topic: str, headers: dict[str, str], value: bytes) -> tuple[object, ...]:
        known = {name: headers[name] for name in headers if name in {"request-id", "path", "reply-topic", KEY, TIME}}
        hints = {name: headers[name] for name in headers if name.lower().startswith("x-dynamo-")}
        return topic, known | hints, value

    assert (message(*record) == message(*other)) is (effect(*record) == effect(*other))


@given(record=records, data=st.data())
def test_a_change_of_a_signed_part_is_noticed(record: Any, data: st.DataObject) -> None:
    topic, headers, value = record
    assume(SIGNATURE not in headers)
    signed = sign(PEM, topic, headers, value, 5)
    assert is_signed_by(PUBLIC, topic, signed, value)
    assert is_signed_by(PUBLIC, topic, {**signed, "traceparent": "added"}, value)
    assert not is_signed_by(OTHER, topic, signed, value)
    assert not is_signed_by(PUBLIC, f"{topic}.", signed, value)
    assert not is_signed_by(PUBLIC, topic, signed, value + b"\0")
    if value:
        at = data.draw(st.integers(0, len(value) - 1))
        flipped = bytes([value[at] ^ data.draw(st.integers(1, 255))])
        assert not is_signed_by(PUBLIC, topic, signed, value[:at] + flipped + value[at + 1 :])
    name = data.draw(covered | st.sampled_from([KEY, TIME]))
    changed = data.draw(texts.filter(lambda text: text != signed.get(name)))
    assert not is_signed_by(PUBLIC, topic, {**signed, name: changed}, value)
    if name in signed:
        assert not is_signed_by(PUBLIC, topic, {one: signed[one] for one in signed if one != name}, value)
    at, letter = data.draw(st.integers(0, 87)), data.draw(st.characters(codec="utf-8"))
    given = signed[SIGNATURE]
    assume(letter != given[at])
    assert not is_signed_by(PUBLIC, topic, {**signed, SIGNATURE: given[:at] + letter + given[at + 1 :]}, value)


@given(public_key=st.binary(min_size=32, max_size=32), record=records, data=st.data())
def test_no_key_and_no_header_raises_an_error(public_key: bytes, record: Any, data: st.DataObject) -> None:
    topic, headers, value = record
    given = data.draw(texts | st.from_regex(r"[A-Za-z0-9+/]{85}[AQgw]==", fullmatch=True))
    assert isinstance(is_signed_by(public_key, topic, {**headers, SIGNATURE: given}, value), bool)


@pytest.mark.parametrize(
    "key", [b"", b"fb-no-pem", pem(X25519PrivateKey.generate()), pem(PRIVATE, BestAvailableEncryption(b"secret"))]
)
def test_only_private_keys_of_ed25519_sign(key: bytes) -> None:
    with pytest.raises((TypeError, ValueError)):
        sign(key, TOPIC, {}, b"", 0)


def test_the_function_in_the_docs_signs() -> None:
    page = (Path(__file__).parents[2] / "docs/kafka-api.md").read_text()
    (code,) = re.findall(r"^```python signing\.py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    documented: dict[str, Any] = {}
    exec(code, documented)
    headers = {"request-id": "order-7", "path": "/v1/completions", "reply-topic": "forebay.replies.a"}
    signed = documented["sign"](PEM, TOPIC, headers, b"{}")
    assert signed == sign(PEM, TOPIC, headers, b"{}", int(signed[TIME]))
