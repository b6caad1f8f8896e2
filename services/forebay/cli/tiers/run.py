"""`forebay tiers`: list, verify and purge stored KV blocks."""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import msgspec
import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from forebay.cli.common.errors import BROKEN, complain, explained, fail
from forebay.cli.common.terminal import bar, counted, in_markup, printable, results
from forebay.cli.common.times import span_us
from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers.directory_layout import TEMPORARY_AGE_S
from forebay.workers.kv_tiers.identity import KvIdentity
from forebay.workers.kv_tiers.store_survey import (
    FoundFile,
    StorePlace,
    file_problem,
    open_place,
    quarantine_reason,
)

THREADS = 8  # files that `verify` reads at a time; buckets respond slowly
AGES = (("under 1h", 3600.0), ("1h to 1d", 86_400.0), ("1d to 7d", 604_800.0), ("over 7d", float("inf")))
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
WEIGHTS_CHARS = 12  # of the digest of the weights in a table; --json has all
BAD_SHOWN = 20  # bad files that `verify` prints; --json has all


def run_list(*, place: str, endpoint: str, json: bool) -> None:
    """Run `forebay tiers list`. command.py documents its options."""
    with explained():
        store = open_place(place, endpoint)
        rows = [(name, found, _total(store, name)) for name, found in store.identities().items()]
    if json:
        for name, found, (blocks, size) in rows:
            line = {"identity": name, "blocks": blocks, "bytes": size, "meaning": found}
            typer.echo(msgspec.json.encode(line))
        return
    table = Table("identity", "model", "rank", "layout", "tokens", "block", "weights", "blocks", "size", box=None)
    for name, found, (blocks, size) in (row for row in rows if row[2][0]):
        table.add_row(name, *map(in_markup, _meaning(found)), str(blocks), size_text(size))
    results().print(table)
    empty = sum(not blocks for *_, (blocks, _) in rows)
    without = f", {empty} without blocks" if empty else ""
    total = size_text(sum(size for *_, (_, size) in rows))
    typer.echo(printable(f"store {store.store_id}: {_identities(len(rows))}{without}, {total}"))


def run_stats(*, place: str, endpoint: str, identity: str, json: bool) -> None:
    """Run `forebay tiers stats`. command.py documents its options."""
    now_s = time.time()
    with explained():
        store = open_place(place, endpoint)
        found = {name: _stats(store, name, now_s) for name in _selected(store, identity)}
    if json:
        for name, one in found.items():
            typer.echo(msgspec.json.encode({"identity": name, **one}))
        return
    ages = [text for text, _ in AGES]
    table = Table("identity", "blocks", "size", *ages, "newest", "oldest", "quarantine", box=None)
    for name, one in found.items():
        bad = ", ".join(f"{count} {reason}" for reason, count in sorted(one["quarantine"].items()))
        table.add_row(
            name,
            str(one["blocks"]),
            size_text(one["bytes"]),
            *(size_text(size) for size in one["bytes_by_age"].values()),
            _age_text(one["newest_s"]),
            _age_text(one["oldest_s"]),
            bad or "-",
        )
    results().print(table)


def run_verify(*, place: str, endpoint: str, identity: str, quarantine: bool, json: bool) -> None:
    """Run `forebay tiers verify`. command.py documents its options."""
    bad: list[tuple[FoundFile, str]] = []
    good, moved = 0, 0
    with explained():
        store = open_place(place, endpoint)
        identities = _selected(store, identity)
        blocks = [file for name in identities for file in _files(store, name) if file.kind == "block"]
        for file, reason in _verified(store, identities, blocks):
            good += not reason
            if reason and reason != "missing":
                bad.append((file, reason))
                if quarantine and identities[file.identity] is not None:  # otherwise, the file may be good
                    store.quarantine(file, reason)
                    moved += 1
    for file, reason in bad if json else bad[:BAD_SHOWN]:
        where = f"{file.identity}/{file.folder}/{file.name}"
        typer.echo(msgspec.json.encode({"file": where, "reason": reason}) if json else f"{reason:<10} {where}")
    if json:
        typer.echo(msgspec.json.encode({"blocks": good + len(bad), "bad": len(bad)}))
    elif len(bad) > BAD_SHOWN:
        typer.echo(f"… ({len(bad) - BAD_SHOWN} more; --json prints all)")
    if bad:
        then = f"{moved} moved to the quarantine" if quarantine else "--quarantine moves them away"
        complain(f"{len(bad)} of {counted(good + len(bad), 'block')} are bad; {then}")
        raise typer.Exit(BROKEN)
    if not json:
        typer.echo(f"{counted(good, 'block')} verified, {size_text(sum(file.bytes for file in blocks))}")


def run_purge(*, place: str, endpoint: str, identity: str, older_than: str, everything: bool, yes: bool) -> None:
    """Run `forebay tiers purge`. command.py documents its options."""
    if everything == bool(identity or older_than):
        fail("give --all, or --identity and --older-than, to select what is removed")
    before_s = time.time() - span_us("--older-than", older_than) / 1e6 if older_than else float("inf")
    with explained():
        store = open_place(place, endpoint)
        files = [file for name in _selected(store, identity) for file in _files(store, name) if _is_old(file, before_s)]
        blocks = sum(file.kind == "block" for file in files)
        what = f"{counted(blocks, 'block')} and {counted(len(files) - blocks, 'other file')}"
        what += f", {size_text(sum(file.bytes for file in files))}"
        if not yes:
            if not sys.stdin.isatty():
                fail(f"{what} would be removed from {printable(place)}; confirm with --yes")
            typer.confirm(f"Remove {what} from {printable(place)}?", abort=True)
        store.remove(files)
    typer.echo(f"removed {what}")


def size_text(size: float) -> str:
    """Return a number of bytes as text, such as `1.5GB`, in the units of options."""
    for unit in UNITS:
        if size < 1000 or unit == UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f}{unit}" if unit == "B" else f"{size:.1f}{unit}"


def _selected(store: StorePlace, digits: str) -> Mapping[str, KvIdentity | None]:
    """Return the identities whose names begin with these digits. If there are none, the command ends."""
    known = store.identities()
    found = {name: one for name, one in known.items() if name.startswith(digits)}
    if digits and not found:
        have = f"it has {', '.join(known)}" if known else "it has none"
        fail(f"--identity {digits}: the store has no such identity; {have}")
    return found


def _files(store: StorePlace, identity: str) -> Iterator[FoundFile]:
    for page in store.files(identity):
        yield from page


def _is_old(file: FoundFile, before_s: float) -> bool:
    """Return whether `purge` removes a file. Files that forebay did not write are kept, and so are current writes."""
    match file.kind:
        case "block" | "quarantined":
            return file.used_s < before_s
        case "temporary":
            return file.used_s < min(before_s, time.time() - TEMPORARY_AGE_S)
        case _:
            return False


def _total(store: StorePlace, identity: str) -> tuple[int, int]:
    sizes = [file.bytes for file in _files(store, identity) if file.kind == "block"]
    return len(sizes), sum(sizes)


def _stats(store: StorePlace, identity: str, now_s: float) -> dict[str, Any]:
    ages = {text: 0 for text, _ in AGES}
    quarantined: Counter[str] = Counter()
    blocks, temporary, size = 0, 0, 0
    used_s: list[float] = []
    for file in _files(store, identity):
        if file.kind == "quarantined":
            quarantined[quarantine_reason(file)] += 1
        elif file.kind == "temporary":
            temporary += 1
        elif file.kind == "block":
            blocks += 1
            size += file.bytes
            age_s = max(0.0, now_s - file.used_s)
            used_s.append(age_s)
            ages[next(text for text, limit_s in AGES if age_s < limit_s)] += file.bytes
    return {
        "blocks": blocks,
        "bytes": size,
        "bytes_by_age": ages,
        "newest_s": min(used_s, default=None),
        "oldest_s": max(used_s, default=None),
        "quarantine": dict(quarantined),
        "temporary": temporary,
    }


def _verified(
    store: StorePlace, identities: Mapping[str, KvIdentity | None], blocks: list[FoundFile]
) -> Iterator[tuple[FoundFile, str]]:
    """Yield each block, and why it is bad. Blocks that were removed meanwhile are `missing`."""

    def check(file: FoundFile) -> tuple[FoundFile, str]:
        try:
            return file, file_problem(store, file, identities[file.identity])
        except FileNotFoundError:
            return file, "missing"
        except OSError as error:
            raise EngineError(f"cannot read {file.name}: {error.strerror}") from error

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


def _identities(count: int) -> str:
    return f"{count} identit{'y' if count == 1 else 'ies'}"


def _age_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit} ago"
    return f"{seconds:.0f}s ago"
