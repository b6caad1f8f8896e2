"""`forebay topics`: what a log holds, readable."""

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from forebay.cli.errors import explained, fail
from forebay.events.base import U32_BYTES, unpack_u32, unpack_u64
from forebay.events.codec import DecodeError, decode
from forebay.events.topics import topic_named
from forebay.transport.base import Record
from forebay.transport.sqlite_log import SqliteLog

app = typer.Typer(help="What a log holds, readable.", no_args_is_help=True)

FOLLOW_S = 0.2
PAGE = 500
LogFile = Annotated[Path, typer.Argument(help="A log file of `forebay up`; it may be in use.")]


@app.callback()
def _root() -> None:
    """What a log holds, readable."""


@app.command("list")
def list_topics(log: LogFile) -> None:
    """Every topic partition with the number of its records."""
    with explained():
        opened = SqliteLog.open(log, readonly=True)
        try:
            for topic, partition, end in opened.topics():
                typer.echo(f"{topic}/{partition}\t{end}")
        finally:
            opened.close()


@app.command("tail")
def tail(
    log: LogFile,
    topic: Annotated[str, typer.Argument(help="The topic, without namespace.")],
    partition: Annotated[int, typer.Option("--partition", "-p", min=0)] = 0,
    count: Annotated[int, typer.Option("--lines", "-n", min=0, help="The last records, so many.")] = 10,
    start: Annotated[int, typer.Option("--from", min=-1, help="From this offset on, in place of the last.")] = -1,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as records come.")] = False,
) -> None:
    """Print records as JSON lines."""
    with explained():
        opened = SqliteLog.open(log, readonly=True)
        try:
            if topic not in {name for name, _, _ in opened.topics()}:
                fail(f"{log} has no topic {topic}; `forebay topics list {log}` shows those that it has")
            offset = start if start >= 0 else max(0, opened.next_offset(topic, partition) - count)
            offset = _print_from(opened, topic, partition, offset)
            while follow:
                time.sleep(FOLLOW_S)
                offset = _print_from(opened, topic, partition, offset)
        finally:
            opened.close()


def _print_from(log: SqliteLog, topic: str, partition: int, offset: int) -> int:
    end = log.next_offset(topic, partition)
    while offset < end:
        for record in log.records(topic, partition, offset, PAGE):
            typer.echo(msgspec.json.encode(readable(record)).decode())
            offset = record.offset + 1
    return offset


def readable(record: Record) -> dict[str, Any]:
    """A record as JSON can show it: packed hashes as hex strings, token ids as numbers."""
    line: dict[str, Any] = {"offset": record.offset, "at_us": record.at_us}
    if record.key is not None:
        line["key"] = record.key.decode(errors="replace")
    if record.headers:
        line["headers"] = dict(record.headers)
    try:
        line["event"] = _plain(decode(topic_named(record.topic), record.value))
    except (DecodeError, KeyError):
        line["value"] = record.value.decode(errors="backslashreplace")
    return line


def _plain(value: Any, name: str = "") -> Any:
    if isinstance(value, msgspec.Struct):
        tag = type(value).__struct_config__.tag
        fields = {field: _plain(getattr(value, field), field) for field in value.__struct_fields__}
        return fields if tag is None else {"type": tag, **fields}
    if isinstance(value, bytes):
        if name == "token_ids":
            assert len(value) % U32_BYTES == 0
            return unpack_u32(value)
        return [f"{number:016x}" for number in unpack_u64(value)]
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, int) and name in ("parent_hash", "tie_seed", "nonce", "content"):
        return f"{value:016x}"
    return value
