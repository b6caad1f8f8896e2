"""`forebay keys`. Kafka is an embedded log here, which has the same topics."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from forebay.cli import keys
from forebay.events.keys import KeySet
from forebay.events.signing import is_signed_by, sign
from forebay.ingress.key_file import read_keys
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import error_of, forebay

LIMITS = {"rpm": 1, "tpm": 2, "in-flight": 3, "budget-day": 4, "budget-month": 5, "weight": 6}
RIGHTS = [f"--{name}={value}" for name, value in LIMITS.items()]
RIGHTS += ["--models=a", "--models=b", "--priority=gold", "--priority=batch", "--cache-namespace=shared"]


@pytest.fixture(params=["topic", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the options that select where keys are stored."""

    @asynccontextmanager
    async def opened(_: object) -> AsyncIterator[SqliteLog]:
        with closing(SqliteLog.open(tmp_path / "run.db")) as log:
            yield log

    async def count(_: object) -> None: ...

    monkeypatch.setattr(keys, "kafka_log", opened)
    monkeypatch.setattr(keys, "count_topics", count)
    if request.param == "topic":
        return ["--kafka", "127.0.0.1:1"]
    (tmp_path / "keys").write_text("a-plain-key")
    return ["--file", str(tmp_path / "keys")]


def created(*arguments: str) -> str:
    """Create a key and return it."""
    run = forebay("keys", "create", *arguments)
    assert run.returncode == 0, run.stderr
    key = run.stdout.removesuffix("\n")
    assert re.fullmatch(r"fb-[A-Za-z0-9_-]{43}", key)
    assert key_id(key) in run.stderr
    assert key not in run.stderr
    return key


def key_id(key: str) -> str:
    return sha256(key.encode()).hexdigest()[:12]


def test_a_key_that_signs_is_created(store: list[str]) -> None:
    run = forebay("keys", "create", "--tenant", "acme", "--signing", "--models=a", *store)
    assert run.returncode == 0, run.stderr
    headers = sign(run.stdout.encode(), "topic", {"request-id": "a"}, b"{}", 1)
    (key,) = listed(store)
    assert (key["key_id"], key["tenant"], key["models"]) == (headers["forebay-key"], "acme", ["a"])
    assert key["key_id"] in run.stderr
    assert is_signed_by(bytes.fromhex(key["public_key"]), "topic", headers, b"{}")
    assert forebay("keys", "revoke", key["key_id"], *store).returncode == 0


def listed(store: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in forebay("keys", "list", *store, "--json").stdout.splitlines()]


def test_a_key_is_created_listed_and_revoked(store: list[str]) -> None:
    first = created("--tenant", "acme", *RIGHTS, "--expires", "2999-01-31T12:00:00Z", *store)
    second = created("--tenant", "beta", "--expires", "90d", *store)
    found = {key["key_id"]: key for key in listed(store)}
    assert list(found) == [key_id(first), key_id(second)]
    key = found[key_id(first)]
    assert key["key_hash"] == sha256(first.encode()).hexdigest()
    names = ["requests_per_minute", "tokens_per_minute", "in_flight", "tokens_per_day", "tokens_per_month", "weight"]
    assert [key[name] for name in names] == [1, 2, 3, 4, 5, 6]
    assert (key["models"], key["queue_classes"], key["cache_namespace"]) == (["a", "b"], ["gold", "batch"], "shared")
    assert key["expires_us"] == datetime(2999, 1, 31, 12, tzinfo=UTC).timestamp() * 1e6
    other = found[key_id(second)]
    assert other["expires_us"] - other["created_us"] == 90 * 86_400_000_000
    assert "models" not in other
    table = " ".join(forebay("keys", "list", *store).stdout.split())
    assert f"{key_id(first)} acme valid until 2999-01-31T12:00:00" in table
    assert "models a, b; requests_per_minute 1; tokens_per_minute 2; in_flight 3; " in table
    assert first not in table
    revoked = forebay("keys", "revoke", key_id(first), *store)
    assert (revoked.returncode, revoked.stdout) == (0, f"revoked {key_id(first)} of acme\n")
    assert [bool(key.get("revoked_us")) for key in listed(store)] == [True, False]
    assert f"the key {key_id(first)} of acme is revoked already, since 2" in error_of(
        "keys", "revoke", key_id(first), *store
    )
    for given in ("ab", "0" * 12):
        assert f"KEY_ID: '{given}' is no id of a key; `forebay keys list`" in error_of("keys", "revoke", given, *store)
    if "--file" in store:
        assert read_keys(Path(store[1])).plain == ("a-plain-key",)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--tenant a/b", "--tenant 'a/b': expected 1 to 128 letters, digits"),
        ("--tenant a --models /", "--models: the model name '/' cannot be used"),
        ("--tenant a --models m --models m", "--models m: the name appears twice"),
        ("--tenant a" + "".join(f" --priority c{number}" for number in range(65)), "--priority: expected at most 64"),
        ("--tenant a --cache-namespace b/c", "--cache-namespace 'b/c': expected 1 to 128 letters"),
        ("--tenant a --expires 2020-01-01", "--expires 2020-01-01: expected a time between now and the year 9999"),
        ("--tenant a --expires -5m", "--expires -5m: expected a time"),
        ("--tenant a --expires 99999999999d", "--expires 99999999999d: expected a time"),
        ("--tenant a --expires 10000-01-01", "--expires 10000-01-01: not a time"),
        ("--tenant a --expires never", "--expires never: not a time"),
        ("--tenant a --expires 0d", "--expires 0d: not a duration"),
    ],
)
def test_invalid_rights_are_rejected(arguments: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    assert error_of("keys", "create", *arguments.split(), "--file", file).startswith(problem)
    assert not file.exists()


def test_a_record_with_odd_times_is_listed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    record = {"type": "key.set", "key_hash": "ab" * 32, "tenant": "acme", "created_us": -1, "expires_us": 1 << 62}
    file.write_text(json.dumps(record))
    assert "valid until 9999-01-01T00:00:00  1970-01-01T00:00:00" in forebay("keys", "list", "--file", file).stdout


def test_only_the_owner_can_read_a_new_file_and_the_mode_of_an_old_one_stays(tmp_path: Path) -> None:
    file, link = tmp_path / "keys", tmp_path / "link"
    link.symlink_to(file)
    created("--tenant", "acme", "--file", str(link))
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    created("--tenant", "acme", "--file", str(link))
    assert (file.stat().st_mode & 0o777, link.is_symlink()) == (0o640, True)
    assert len(listed(["--file", str(file)])) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys", "link"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "line 1 is no record of `forebay keys create`"),
        (b"\xff", "not UTF-8 text"),
        (None, "cannot write"),
    ],
)
def test_an_unusable_file_is_not_changed(content: bytes | None, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "keys" if content is not None else tmp_path / "none" / "keys"
    if content is not None:
        file.write_bytes(content)
    assert problem in error_of("keys", "create", "--tenant", "acme", "--file", file)
    assert content is None or file.read_bytes() == content
    assert error_of("keys", "list", "--file", file)


def test_commands_at_the_same_time_lose_no_key(tmp_path: Path) -> None:
    file, new = tmp_path / "keys", [KeySet(key_hash=f"{number:012x}" + "0" * 52, tenant="acme") for number in range(20)]

    async def create_all() -> None:
        await asyncio.gather(*(asyncio.to_thread(keys.append, file, event) for event in new))

    asyncio.run(create_all())
    assert sorted(read_keys(file).tenants.values(), key=lambda key: key.key_hash) == new


def test_an_empty_topic_has_no_keys(store: list[str]) -> None:
    if "--kafka" in store:
        assert forebay("keys", "list", *store).stdout == "no keys\n"
