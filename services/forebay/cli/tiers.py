"""`forebay tiers`: list, verify and purge the blocks of all identities in a store.

Workers may use the store at the same time. They notice removed blocks as misses.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from forebay.cli.command import TiersListCommand, TiersPurgeCommand, TiersVerifyCommand
from forebay.cli.common.errors import BROKEN, explained, fail
from forebay.cli.common.tables import bar, in_markup, results
from forebay.cli.common.terminal import counted, printable
from forebay.cli.common.times import time_us
from forebay.runtime.errors import ConfigError
from forebay.workers.kv_tiers.block_format import BAD_REASONS, BlockFormat, file_path, parse_file_name
from forebay.workers.kv_tiers.block_store import (
    IDENTITY_FILE,
    QUARANTINE,
    STORE_FILE,
    TEMPORARY_AGE_S,
    Storage,
    StorageError,
    StoredFile,
    store_id_of,
)
from forebay.workers.kv_tiers.disk import Directory
from forebay.workers.kv_tiers.identity import KvIdentity
from forebay.workers.kv_tiers.object_store import Bucket

THREADS = 8  # files that `verify` reads at a time; buckets respond slowly
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
AGES = (("under 1h", 3600.0), ("1h to 1d", 86_400.0), ("1d to 7d", 604_800.0), ("over 7d", float("inf")))
WEIGHTS_CHARS = 12  # of the digest of the weights in a table; --json has all
FOLDERS = ("", "*/", "*/*/")  # of a store, a rank of a worker, and a worker of `forebay up`
BAD_SHOWN = 20  # bad files that `verify` prints; --json has all


def run_list(options: TiersListCommand) -> None:
    for place in _places(options.place):
        _list(place, options)


def _list(place: str, options: TiersListCommand) -> None:
    now_s = time.time()
    with explained():
        store = _open(place)
        rows = {name: (found, _stats(store, name, now_s)) for name, found in _selected(store, options.identity).items()}
    if options.json:
        for name, (found, one) in rows.items():
            click.echo(msgspec.json.encode({"place": place, "identity": name, "meaning": found, **one}))
        return
    columns = ("identity", "model", "rank", "layout", "tokens", "block", "weights", "blocks", "size", "used ago", "bad")
    table = Table(*columns, box=None)
    for name, (found, one) in rows.items():
        ages = [_age_text(one[key]) for key in ("newest_s", "oldest_s")]
        bad = ", ".join(f"{count} {reason}" for reason, count in sorted(one["quarantine"].items()))
        if one["blocks"] or bad:
            used = " to ".join(dict.fromkeys(ages))  # the newest and the oldest block
            size = size_text(one["bytes"])
            table.add_row(name, *map(in_markup, _meaning(found)), str(one["blocks"]), size, used, bad or "-")
    results().print(table)
    empty = sum(not one["blocks"] for _, one in rows.values())
    without = f", {empty} without blocks" if empty else ""
    total = size_text(sum(one["bytes"] for _, one in rows.values()))
    counts = f"{len(rows)} identit{'y' if len(rows) == 1 else 'ies'}"
    where = f" in {place}" if place != options.place else ""
    click.echo(printable(f"store {store_id_of(store)}{where}: {counts}{without}, {total}"))


def run_verify(options: TiersVerifyCommand) -> None:
    bad: list[tuple[StoredFile, str]] = []
    good, moved = 0, 0
    with explained():
        store = _open(options.place)
        identities = _selected(store, options.identity)
        blocks = [file for name in identities for file in _files(store, name) if file.kind == "block"]
        for file, reason in _verified(store, identities, blocks):
            good += not reason
            if reason and reason != "missing":
                bad.append((file, reason))
                if options.quarantine and identities[file.identity] is not None:  # otherwise, the file may be good
                    store.move(file.path, f"{file.identity}/{QUARANTINE}/{reason}-{file.name}")
                    moved += 1
    for file, reason in bad if options.json else bad[:BAD_SHOWN]:
        line = {"file": file.path, "reason": reason}
        click.echo(msgspec.json.encode(line) if options.json else f"{reason:<10} {file.path}")
    if options.json:
        click.echo(msgspec.json.encode({"blocks": good + len(bad), "bad": len(bad)}))
    elif len(bad) > BAD_SHOWN:
        click.echo(f"… ({len(bad) - BAD_SHOWN} more; --json prints all)")
    if bad:
        then = f"{moved} moved to the quarantine" if options.quarantine else "--quarantine moves them away"
        fail(f"{len(bad)} of {counted(good + len(bad), 'block')} are bad; {then}", BROKEN)
    if not options.json:
        click.echo(f"{counted(good, 'block')} verified, {size_text(sum(file.bytes for file in blocks))}")


def run_purge(options: TiersPurgeCommand) -> None:
    if options.everything == bool(options.identity or options.end):
        fail("give --all, or --identity and --to, to select what is removed")
    before_s = time_us("--to", options.end, time.time_ns() // 1000) / 1e6 if options.end else float("inf")
    with explained():
        store = _open(options.place)
        files = [
            file
            for name in _selected(store, options.identity)
            for file in _files(store, name)
            if _is_old(file, before_s)
        ]
        blocks = sum(file.kind == "block" for file in files)
        what = f"{counted(blocks, 'block')} and {counted(len(files) - blocks, 'other file')}"
        what += f", {size_text(sum(file.bytes for file in files))}"
        if not options.yes:
            if not sys.stdin.isatty():
                fail(f"{what} would be removed from {printable(options.place)}; confirm with --yes")
            click.confirm(f"Remove {what} from {printable(options.place)}?", abort=True)
        store.delete([file.path for file in files])
    click.echo(f"removed {what}")


def size_text(size: float) -> str:
    """Return a number of bytes as text, such as `1.5GB`, in the units of options."""
    for unit in UNITS:
        if size < 1000 or unit == UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f}{unit}" if unit == "B" else f"{size:.1f}{unit}"


def _places(place: str) -> list[str]:
    """Return the stores of the ranks below a directory of a disk tier; otherwise `place` itself."""
    below = () if place.startswith("s3://") else (Path(place).glob(f"{folders}{STORE_FILE}") for folders in FOLDERS)
    found = next((sorted(str(file.parent) for file in files) for files in map(list, below) if files), [])
    return found or [place]


def _open(place: str) -> Storage:
    """Return the files of a store. Unlike a worker, this creates nothing and takes no lock."""
    places = _places(place)
    if len(places) > 1:
        raise ConfigError(f"{place} has the stores of several ranks; give one of: {', '.join(places)}")
    (place,) = places
    store = Bucket(place) if place.startswith("s3://") else Directory(Path(place))
    store_id_of(store)  # raises EngineError if there is no store
    return store


def _selected(store: Storage, digits: str) -> Mapping[str, KvIdentity | None]:
    """Return the identities whose names begin with these digits. If there are none, the command ends."""
    known = store.identities()
    found = {name: _identity(store, name) for name in known if name.startswith(digits)}
    if digits and not found:
        have = f"it has {', '.join(known)}" if known else "it has none"
        fail(f"--identity {digits}: the store has no such identity; {have}")
    return found


def _identity(store: Storage, name: str) -> KvIdentity | None:
    """Return the identity of a folder; None if its description is damaged or missing."""
    try:
        return msgspec.json.decode(store.get(f"{name}/{IDENTITY_FILE}"), type=KvIdentity)
    except msgspec.MsgspecError:
        return None
    except StorageError as error:
        if error.reason != "missing":
            raise
        return None


def _files(store: Storage, identity: str) -> Iterator[StoredFile]:
    for page in store.pages(identity):
        yield from page


def _is_old(file: StoredFile, before_s: float) -> bool:
    """Return whether `purge` removes a file. Files that forebay did not write are kept, and so are current writes."""
    match file.kind:
        case "block" | "quarantined":
            return file.used_s < before_s
        case "temporary":
            return file.used_s < min(before_s, time.time() - TEMPORARY_AGE_S)
        case _:
            return False


def _stats(store: Storage, identity: str, now_s: float) -> dict[str, Any]:
    ages = {text: 0 for text, _ in AGES}
    quarantined: Counter[str] = Counter()
    used_s: list[float] = []
    for file in _files(store, identity):
        if file.kind == "quarantined":
            reason = file.name.partition("-")[0]
            quarantined[reason if reason in BAD_REASONS else "unknown"] += 1
        elif file.kind == "block":
            age_s = max(0.0, now_s - file.used_s)
            used_s.append(age_s)
            ages[next(text for text, limit_s in AGES if age_s < limit_s)] += file.bytes
    return {
        "blocks": len(used_s),
        "bytes": sum(ages.values()),
        "bytes_by_age": ages,
        "newest_s": min(used_s, default=None),
        "oldest_s": max(used_s, default=None),
        "quarantine": dict(quarantined),
    }


def _problem(store: Storage, file: StoredFile, identity: KvIdentity | None) -> str:
    """Read the file of a block, and return why it is bad: one of `BAD_REASONS`, or `missing`; an empty text if good."""
    name = parse_file_name(file.name)
    assert name is not None
    if identity is None or file.path != f"{identity.short_digest}/{file_path(name)}":
        return "foreign"
    form = BlockFormat(identity)
    try:
        content = store.get(file.path, form.file_bytes)
    except StorageError as error:
        if error.reason == "missing":  # it was removed meanwhile
            return "missing"
        raise
    return form.problem(memoryview(content), name)


def _verified(
    store: Storage, identities: Mapping[str, KvIdentity | None], blocks: list[StoredFile]
) -> Iterator[tuple[StoredFile, str]]:
    """Yield each block, and why it is bad. Blocks that were removed meanwhile are `missing`."""

    def check(file: StoredFile) -> tuple[StoredFile, str]:
        return file, _problem(store, file, identities[file.identity])

    columns = (
        TextColumn("verifying"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[bad]} bad"),
        TimeRemainingColumn(),
    )
    waiting = iter(blocks)
    with bar(*columns) as progress, ThreadPoolExecutor(THREADS) as threads:
        task = progress.add_task("", total=sum(file.bytes for file in blocks), bad=0)
        bad = 0
        while page := list(islice(waiting, 4 * THREADS)):  # a whole store would not fit into memory
            for file, reason in threads.map(check, page):
                bad += reason not in ("", "missing")
                progress.update(task, advance=file.bytes, bad=bad)
                yield file, reason


def _meaning(identity: KvIdentity | None) -> tuple[str, ...]:
    if identity is None:
        return ("unknown", "", "", "", "", "")
    one = identity
    return (
        one.model or "-",
        f"{one.tp_rank} of {one.tp_size}",
        f"{one.layout} {one.dtype}",
        str(one.block_size),
        size_text(one.block_bytes),
        one.weights[:WEIGHTS_CHARS],
    )


def _age_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
