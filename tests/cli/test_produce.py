"""`forebay produce` without a broker: request encoding, response assembly and errors."""

import socket
from pathlib import Path

import click
import msgspec
import pytest

from forebay.cli.produce import ProduceRun
from forebay.ingress.openai.requests import CHAT_PATH, TEXT_PATH
from tests.cli.in_process import forebay

CHAT = b'{"model":"m","messages":[]}'


def piece(index: int, *, request_id: str = "run-1", last: bool = False, status: int = 200) -> dict[str, str]:
    return {"request-id": request_id, "index": str(index), "last": "1" if last else "0", "status": str(status)}


@pytest.mark.parametrize(
    ("line", "request_id", "path", "body"),
    [
        (CHAT, "run-7", CHAT_PATH, CHAT),
        (b'{"prompt":"once"}', "run-7", TEXT_PATH, b'{"prompt":"once"}'),
        (b'{"request_id":"mine","prompt":"once"}', "mine", TEXT_PATH, b'{"prompt":"once"}'),
        *((line, "run-7", CHAT_PATH, line) for line in (b"{no json", b"[1]", b'"request_id"', b"\xff", b"[" * 100_000)),
    ],
)
def test_a_line_becomes_a_request_that_the_ingress_validates(
    line: bytes, request_id: str, path: str, body: bytes
) -> None:
    assert ProduceRun("run").encode_request(7, line) == (request_id, path, body)


@pytest.mark.parametrize("wrong", ["a b/!", "", None, 7, "x" * 129])
def test_an_invalid_id_is_rejected(wrong: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit):
        ProduceRun().encode_request(3, msgspec.json.encode({"request_id": wrong}))
    assert capsys.readouterr().err.startswith(f"forebay: line 3: invalid request_id {wrong!r}; use 1 to 128 letters")


def test_a_duplicate_id_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    run = ProduceRun()
    run.encode_request(1, b'{"request_id":"mine"}')
    with pytest.raises(click.exceptions.Exit):
        run.encode_request(2, b'{"request_id":"mine"}')
    assert capsys.readouterr().err == "forebay: line 2: duplicate request_id 'mine'\n"


def test_a_response_is_complete_with_its_last_record_and_repeated_records_are_dropped() -> None:
    run = ProduceRun("run")
    run.encode_request(1, CHAT)
    run.encode_request(2, CHAT)
    assert run.add_record(piece(0), b"0") is None
    assert run.add_record(piece(1), b"1") is None
    for again in (0, 1):
        assert run.add_record(piece(again), b"again") is None
    answer = run.add_record(piece(2, last=True), b"2")
    assert msgspec.json.encode(answer) == b'{"request_id":"run-1","status":200,"chunks":[0,1,2]}'
    assert run.add_record(piece(2, last=True), b"2") is None
    assert run.add_record(piece(0, request_id="theirs", last=True), b"{}") is None
    answer = run.add_record(piece(0, request_id="run-2", last=True, status=503), b'{"a":1}')
    assert msgspec.json.encode(answer) == b'{"request_id":"run-2","status":503,"body":{"a":1}}'
    assert (run.errors, run.waiting) == (1, set())


def test_an_unreachable_kafka_is_reported(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(CHAT)
    with socket.socket() as taken:  # bound but not listening
        taken.bind(("127.0.0.1", 0))
        run = forebay("produce", str(lines), "--kafka", f"127.0.0.1:{taken.getsockname()[1]}")
    assert run.returncode == 2
    assert "cannot be used" in run.stderr
    assert run.stderr.count("\n") == 1
