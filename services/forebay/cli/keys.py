"""`forebay keys`: create, list and revoke API keys of tenants, on the topic `keys` or in a file."""

import asyncio
import re
from base64 import urlsafe_b64encode
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import click
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from msgspec.structs import replace

from forebay import runtime
from forebay.cli.command import KeysCreateCommand, KeysListCommand, KeysRevokeCommand, KeyStoreOptions
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import kafka_log
from forebay.cli.common.tables import print_table
from forebay.cli.common.times import span_us, time_us
from forebay.events.codec import encode
from forebay.events.keys import KEY_ID_DIGITS, LISTED_MAX, KeySet
from forebay.events.topics import KEYS
from forebay.ingress.key_file import parse_keys, read_keys
from forebay.processes.names import named, names
from forebay.runtime.files import FILE_BYTES_MAX, read_text
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import count_topics
from forebay.transport.keys import KeyBook
from forebay.transport.sqlite.recording import utc

PREFIX = "fb-"  # so that scanners for leaked secrets find keys
KEY_BYTES = 32
TENANT = re.compile(r"[A-Za-z0-9._-]{1,128}")
EXPECTED = "expected 1 to 128 letters, digits, dots, dashes and underscores"
DURATION = re.compile(r".*[smhd]")
LAST_US = 253_370_764_800_000_000  # the year 9999
OTHER_COLUMNS = ("type", "key_hash", "tenant", "created_us", "expires_us", "revoked_us")
PRIVATE = 0o600  # mode of a new file


def run_create(options: KeysCreateCommand) -> None:
    with explained():
        public = b""
        if options.signing:
            private = Ed25519PrivateKey.from_private_bytes(runtime.random_bytes(KEY_BYTES))
            public = private.public_key().public_bytes_raw()
            key = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode().strip()
        else:
            key = PREFIX + urlsafe_b64encode(runtime.random_bytes(KEY_BYTES)).rstrip(b"=").decode()
        event = _event(options, sha256(public or key.encode()).hexdigest(), public.hex())
        _store(options.store, event)
    click.echo(key)
    click.echo(f"forebay: key id {event.key_id} of {event.tenant}; the key is not shown again", err=True)


def _event(options: KeysCreateCommand, key_hash: str, public_key: str) -> KeySet:
    """Return the event of a new key. Raises ConfigError for an invalid name; other invalid options end the command."""
    require_tenant(options.tenant)
    namespace = options.cache_namespace
    if namespace and not TENANT.fullmatch(namespace):
        fail(f"--cache-namespace {namespace[:64]!r}: {EXPECTED}")
    models, classes = names("--models", options.models), names("--priority", options.priority)
    for flag, given in (("--models", models), ("--priority", classes)):
        if len(given) > LISTED_MAX:
            fail(f"{flag}: expected at most {LISTED_MAX} values, got {len(given)}")
    now_us = runtime.wall_us()
    return KeySet(
        key_hash=key_hash,
        tenant=options.tenant,
        models=tuple(named("--models", "model", name) for name in models),
        requests_per_minute=options.rpm or 0,
        tokens_per_minute=options.tpm or 0,
        in_flight=options.in_flight or 0,
        tokens_per_day=options.budget_day or 0,
        tokens_per_month=options.budget_month or 0,
        weight=options.weight,
        queue_classes=classes,
        cache_namespace=namespace,
        public_key=public_key,
        created_us=now_us,
        expires_us=_expiry_us(options.expires, now_us),
    )


def require_tenant(tenant: str) -> None:
    """End the command unless this is a valid name of a tenant."""
    if not TENANT.fullmatch(tenant):
        fail(f"--tenant {tenant[:64]!r}: {EXPECTED}")


def _expiry_us(text: str, now_us: int) -> int:
    if not text:
        return 0
    is_duration = DURATION.fullmatch(text) and not text.startswith("-")
    at_us = now_us + span_us("--expires", text) if is_duration else time_us("--expires", text, now_us)
    if not now_us < at_us < LAST_US:
        fail(f"--expires {text}: expected a time between now and the year 9999")
    return at_us


def run_list(options: KeysListCommand) -> None:
    with explained():
        keys = sorted(_stored(options.store), key=lambda key: (key.created_us, key.key_hash))
    if options.json:
        for key in keys:
            click.echo(msgspec.json.encode({"key_id": key.key_id, **msgspec.to_builtins(key)}))
    elif not keys:
        click.echo("no keys")
    else:
        now_us = runtime.wall_us()
        rows = [(key.key_id, key.tenant, _state(key, now_us), _utc(key.created_us), _rights(key)) for key in keys]
        print_table(("id", "tenant", "state", "created (UTC)", "rights"), rows)


def _state(key: KeySet, now_us: int) -> str:
    if key.revoked_us:
        return "revoked"
    if not key.expires_us:
        return "valid"
    return f"{'expired' if now_us >= key.expires_us else 'valid until'} {_utc(key.expires_us)}"


def _utc(at_us: int) -> str:
    return utc(min(max(at_us, 0), LAST_US))[:19]


def _rights(key: KeySet) -> str:
    shown = {name: value for name, value in msgspec.to_builtins(key).items() if name not in OTHER_COLUMNS}
    texts = {name: ", ".join(value) if isinstance(value, tuple) else str(value) for name, value in shown.items()}
    return "; ".join(f"{name} {text}" for name, text in texts.items()) or "all"


def run_revoke(options: KeysRevokeCommand) -> None:
    store, now_us = options.store, runtime.wall_us()
    with explained():
        key = _meant(options.key_id, _stored(store))
        if key.revoked_us:
            fail(f"the key {key.key_id} of {key.tenant} is revoked already, since {_utc(key.revoked_us)} UTC")
        _store(store, replace(key, revoked_us=now_us))
    click.echo(f"revoked {key.key_id} of {key.tenant}")


def _meant(given: str, keys: list[KeySet]) -> KeySet:
    """Return the key with an id. An unknown id ends the command."""
    found = [key for key in keys if len(given) >= KEY_ID_DIGITS and key.key_hash.startswith(given)]
    if len(found) != 1:
        problem = "begins several keys; give more digits of the hash" if found else "is no id of a key"
        fail(f"KEY_ID: {given[:64]!r} {problem}; `forebay keys list` shows the ids")
    return found[0]


def _store(options: KeyStoreOptions, event: KeySet) -> None:
    """Append an event to the topic or to the file. Raises ConfigError or LogError."""
    if options.file is None:
        asyncio.run(_of_topic(options.settings(), event))
    else:
        append(options.file, event)


def _stored(options: KeyStoreOptions) -> list[KeySet]:
    """Return the newest events of all keys. Raises ConfigError or LogError."""
    if options.file is not None:
        return list(read_keys(options.file).tenants.values())
    return asyncio.run(_of_topic(options.settings()))


async def _of_topic(settings: KafkaSettings, new: KeySet | None = None) -> list[KeySet]:
    """Return the keys on the topic `keys`, after appending the event of one if given. Raises LogError."""
    await count_topics(settings)  # a client of Kafka would wait for a missing topic
    async with kafka_log(settings) as log:
        with closing(KeyBook(log)) as book:
            await book.start()
            if new is not None:
                await book.set(new)
            return list(book.keys.values())


def append(file: Path, event: KeySet) -> None:
    """Append the record of a key to a file, of which the last record of a key counts. A new file is private.

    Raises ConfigError if the file is invalid. If it cannot be written, the command ends.
    """
    line = f"{encode(KEYS, event).decode()}\n"
    try:
        file.touch(PRIVATE)
        text = read_text(str(file), file, FILE_BYTES_MAX + 1)
        if text and not text.endswith("\n"):
            line = f"\n{line}"
        parse_keys(file, text + line)
        with file.open("ab") as opened:
            opened.write(line.encode())  # at once, so that commands at the same time do not mix their lines
    except OSError as error:
        fail(f"cannot write {file}: {error.strerror}")
