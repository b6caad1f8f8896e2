"""`forebay tiers`: list, verify and purge stores in directories and buckets."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.workers.kv_tiers.object_store import ObjectStore
from tests.cli.in_process import error_of, forebay
from tests.workers.kv_tiers.buckets import BUCKET, KEYS, client, moto
from tests.workers.kv_tiers.cases import QUOTA, identity, open_directory, path_of, write

ONE, OTHER = identity(), identity("other/model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a store with 3 blocks of one identity and 2 of another one."""
    for who, count in ((ONE, 3), (OTHER, 2)):
        store = open_directory(tmp_path, shared=True, who=who)
        assert write(store, range(count)) == [""] * count
        store.close()
    return tmp_path


def damage(root: Path, number: int) -> None:
    path = path_of(root, number)
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def age(root: Path, number: int, days: float) -> None:
    path = path_of(root, number)
    used_s = path.stat().st_mtime - days * 86_400
    os.utime(path, (used_s, used_s))


def test_list_explains_the_identities(folder: Path) -> None:
    run = forebay("tiers", "list", folder)
    assert run.returncode == 0
    (row,) = (line for line in run.stdout.splitlines() if line.split()[0] == OTHER.short_digest)
    for text in ("other/model", "0 of 1", "NHD bfloat16", " 16 ", "5.0kB", OTHER.weights[:12], "2", "18.2kB"):
        assert text in row
    assert run.stdout.splitlines()[-1].endswith(": 2 identities, 45.5kB")
    lines = [json.loads(line) for line in forebay("tiers", "list", folder, "--json").stdout.splitlines()]
    assert {line["identity"]: line["blocks"] for line in lines} == {ONE.short_digest: 3, OTHER.short_digest: 2}
    assert {line["meaning"]["weights"] for line in lines} == {ONE.weights, OTHER.weights}


def test_the_directory_of_a_disk_tier_lists_its_ranks(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    folders = [disk / "w0" / "rank-0", disk / "w1" / "rank-0"]
    for count, folder in enumerate(folders, 1):
        folder.mkdir(parents=True)
        store = open_directory(folder, shared=False, who=ONE)
        write(store, range(count))
        store.close()
    text = forebay("tiers", "list", disk).stdout
    assert [line.split(" in ")[1] for line in text.splitlines() if line.startswith("store ")] == [
        f"{folders[0]}: 1 identity, 9.1kB",
        f"{folders[1]}: 1 identity, 18.2kB",
    ]
    assert forebay("tiers", "verify", disk / "w1").stdout == "2 blocks verified, 18.2kB\n"
    assert f"several ranks; give one of: {folders[0]}, {folders[1]}" in error_of("tiers", "verify", disk)


def test_list_shows_ages_and_the_quarantine(folder: Path) -> None:
    for number, days in ((0, 0.5), (1, 30)):
        age(folder, number, days)
    damage(folder, 2)
    assert forebay("tiers", "verify", folder, "--quarantine").returncode == 1
    run = forebay("tiers", "list", folder, "--identity", ONE.short_digest[:6])
    assert run.returncode == 0
    (row,) = (line for line in run.stdout.splitlines() if line.split()[0] == ONE.short_digest)
    assert row.split()[-7:] == ["2", "18.2kB", "12h", "to", "30d", "1", "corrupt"]
    (line,) = forebay("tiers", "list", folder, "--identity", ONE.short_digest, "--json").stdout.splitlines()
    found = json.loads(line)
    assert found["bytes_by_age"] == {"under 1h": 0, "1h to 1d": 9096, "1d to 7d": 0, "over 7d": 9096}
    assert (found["quarantine"], found["blocks"]) == ({"corrupt": 1}, 2)


def test_verify_reports_every_bad_block(folder: Path) -> None:
    assert forebay("tiers", "verify", folder).stdout == "5 blocks verified, 45.5kB\n"
    damage(folder, 0)
    path_of(folder, 1).write_bytes(path_of(folder, 2).read_bytes())
    with path_of(folder, 2).open("r+b") as file:
        file.truncate(5000)
    path_of(folder, 1, OTHER).write_bytes(b"")
    run = forebay("tiers", "verify", folder)
    assert run.returncode == 1
    assert sorted(line.split()[0] for line in run.stdout.splitlines()) == [
        "corrupt",
        "foreign",
        "truncated",
        "truncated",
    ]
    assert run.stderr == "forebay: 4 of 5 blocks are bad; --quarantine moves them away\n"
    run = forebay("tiers", "verify", folder, "--identity", OTHER.short_digest, "--json")
    assert [json.loads(line) for line in run.stdout.splitlines()][-1] == {"blocks": 2, "bad": 1}
    assert forebay("tiers", "verify", folder, "--quarantine").returncode == 1
    run = forebay("tiers", "verify", folder)
    assert (run.returncode, run.stdout) == (0, "1 block verified, 9.1kB\n")


def test_verify_finds_blocks_without_a_known_identity(folder: Path) -> None:
    (folder / OTHER.short_digest / "identity.json").write_bytes(b"damaged")
    run = forebay("tiers", "verify", folder, "--quarantine")
    assert run.returncode == 1
    assert run.stderr.startswith("forebay: 2 of 5 blocks are bad")
    assert not list(folder.glob("*/quarantine/*"))  # the blocks may be good
    assert "unknown" in forebay("tiers", "list", folder).stdout


def test_purge_removes_what_was_selected(folder: Path) -> None:
    (folder / ONE.short_digest / "ab").mkdir(exist_ok=True)
    foreign = folder / ONE.short_digest / "ab" / "notes.txt"
    foreign.write_bytes(b"not of forebay")
    age(folder, 1, 8)
    run = forebay("tiers", "purge", folder, "--to", "-7d", "--yes")
    assert run.stdout == "removed 1 block and 0 other files, 9.1kB\n"
    run = forebay("tiers", "purge", folder, "--identity", OTHER.short_digest, "--yes")
    assert run.stdout == "removed 2 blocks and 0 other files, 18.2kB\n"
    assert "1 without blocks" in forebay("tiers", "list", folder).stdout
    damage(folder, 0)
    forebay("tiers", "verify", folder, "--quarantine")
    run = forebay("tiers", "purge", folder, "--all", "--yes")
    assert run.stdout == "removed 1 block and 1 other file, 18.2kB\n"
    assert foreign.exists()
    store = open_directory(folder, shared=True)
    assert write(store, [7]) == [""]  # the store still works


def test_purge_needs_a_selection_and_a_confirmation(folder: Path) -> None:
    run = forebay("tiers", "purge", folder, "--all")
    assert (run.returncode, run.stdout) == (2, "")
    assert "5 blocks and 0 other files, 45.5kB would be removed from" in run.stderr
    assert "confirm with --yes" in run.stderr
    for arguments in ([], ["--all", "--to", "-1d"], ["--all", "--identity", "ab"]):
        assert "give --all, or --identity and --to" in error_of("tiers", "purge", folder, "--yes", *arguments)
    assert forebay("tiers", "verify", folder).stdout.startswith("5 blocks")


@pytest.mark.parametrize("command", ["list", "verify", "purge"])
def test_places_without_a_store_are_refused(tmp_path: Path, command: str) -> None:
    more = ["--all", "--yes"] if command == "purge" else []
    assert (
        error_of("tiers", command, tmp_path, *more, code=1)
        == f"{tmp_path} is not a store of KV blocks: it has no store.json"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_identity_is_refused(folder: Path) -> None:
    assert "the store has no such identity; it has" in error_of("tiers", "verify", folder, "--identity", "zz")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, text in KEYS.items():
        monkeypatch.setenv(name, text)
    with moto() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield endpoint


def test_a_bucket_is_managed_like_a_directory(bucket: str) -> None:
    place = f"s3://{BUCKET}/prefix"
    run = forebay("tiers", "list", place)
    assert run.stderr == f"forebay: {place} is not a store of KV blocks: it has no store.json\n"
    store = ObjectStore(place, ONE, quota_bytes=QUOTA, endpoint=bucket)
    write(store, range(4))
    assert forebay("tiers", "verify", place).stdout == "4 blocks verified, 36.4kB\n"
    key = f"prefix/{path_of(Path(), 2).as_posix()}"
    client(bucket).put_object(Bucket=BUCKET, Key=key, Body=b"short")
    run = forebay("tiers", "verify", place, "--quarantine")
    assert run.returncode == 1
    assert run.stdout.split()[0] == "truncated"
    row = forebay("tiers", "list", place).stdout.splitlines()[1].strip()
    assert row.startswith(ONE.short_digest)
    assert re.search(r" 3 +27\.3kB ", row)
    assert row.endswith("1 truncated")
    run = forebay("tiers", "purge", place, "--identity", ONE.short_digest[:8], "--yes")
    assert run.stdout == "removed 3 blocks and 1 other file, 27.3kB\n"
    assert "1 identity, 1 without blocks" in forebay("tiers", "list", place).stdout
    assert "NoSuchBucket" in error_of("tiers", "list", "s3://no-such-bucket/x", code=1)
