"""`forebay produce` without a broker: request encoding, response assembly and errors."""

import socket
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from forebay.cli.produce import LineUnusable, ProduceRun, summary_lines
from forebay.cli.produce_command import produce
from forebay.ingress.kafka_api.request import CHAT_PATH, TEXT_PATH

app = typer.Typer()
app.command()(produce)

CHAT = b'{"model":"m","messages":[]}'


def piece(index: int, *, last: bool = False, status: int = 200) -> dict[str, str]:
    return {"index": str(index), "last": "1" if last else "0", "status": str(status)}


def test_a_line_becomes_a_record_with_an_id_of_run_and_number() -> None:
    run = ProduceRun("run")
    request = run.encode_request(7, CHAT)
    assert (request.request_id, request.path, request.body) == ("run-7", CHAT_PATH, CHAT)


def test_a_prompt_uses_the_completions_endpoint() -> None:
    assert ProduceRun().encode_request(1, b'{"model":"m","prompt":"once"}').path == TEXT_PATH


def test_a_line_can_set_its_request_id() -> None:
    request = ProduceRun().encode_request(1, b'{"request_id":"mine","model":"m","prompt":"once"}')
    assert request.request_id == "mine"
    assert msgspec.json.decode(request.body) == {"model": "m", "prompt": "once"}


@pytest.mark.parametrize("line", [b"{no json", b"[1]", b'"request_id"', b"\xff", b"[" * 100_000])
def test_an_invalid_line_gets_an_error_response(line: bytes) -> None:
    request = ProduceRun("run").encode_request(1, line)
    assert (request.request_id, request.body) == ("run-1", line)


@pytest.mark.parametrize("name", ['"two words"', "7", "null", '""'])
def test_invalid_request_id_is_reported_with_its_line(name: str) -> None:
    with pytest.raises(LineUnusable, match="line 3: invalid request_id"):
        ProduceRun().encode_request(3, b'{"request_id":%s}' % name.encode())


def test_a_duplicate_id_is_rejected() -> None:
    run = ProduceRun()
    run.encode_request(1, b'{"request_id":"mine"}')
    with pytest.raises(LineUnusable, match="line 2: duplicate request_id 'mine'"):
        run.encode_request(2, b'{"request_id":"mine"}')


def test_a_complete_response_is_returned_as_body() -> None:
    run = ProduceRun("run")
    run.encode_request(1, CHAT)
    answer = run.add_record("run-1", piece(0, last=True), b'{"a":1}')
    assert msgspec.json.encode(answer) == b'{"request_id":"run-1","status":200,"body":{"a":1}}'
    assert (run.errors, run.waiting) == (0, set())


def test_redelivered_chunks_of_a_stream_are_dropped() -> None:
    run = ProduceRun("run")
    run.encode_request(1, CHAT)
    assert run.add_record("run-1", piece(0), b"0") is None
    assert run.add_record("run-1", piece(1), b"1") is None
    for again in (0, 1):
        assert run.add_record("run-1", piece(again), b"again") is None
    answer = run.add_record("run-1", piece(2, last=True), b"2")
    assert msgspec.json.encode(answer) == b'{"request_id":"run-1","status":200,"chunks":[0,1,2]}'
    assert run.add_record("run-1", piece(2, last=True), b"2") is None


def test_responses_to_other_requests_are_ignored() -> None:
    assert ProduceRun().add_record("theirs", piece(0, last=True), b"{}") is None


def test_errors_are_counted_by_kind() -> None:
    run = ProduceRun("run")
    for number in (1, 2, 3, 4, 5):
        run.encode_request(number, CHAT)
    error = b'{"error": {"message": "no router owns the group", "code": "no_owner"}}'
    for number in (1, 2):
        run.add_record(f"run-{number}", piece(0, last=True, status=503), error)
    run.add_record("run-3", piece(0, last=True, status=500), b"{}")
    run.add_record("run-4", piece(0, last=True), b"{}")
    assert run.errors == 3
    assert list(summary_lines(run, wait=True)) == [
        "5 requests sent, 4 answered, 3 of them with an error, 1 missing",
        "failed 2x: HTTP 503 no_owner: no router owns the group",
        "failed 1x: HTTP 500: {}",
    ]


def test_missing_file_is_reported(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path / "none.jsonl")])
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr


def test_unreachable_kafka_is_reported(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(CHAT)
    with socket.socket() as taken:  # bound but not listening
        taken.bind(("127.0.0.1", 0))
        result = CliRunner().invoke(app, [str(lines), "--kafka", f"127.0.0.1:{taken.getsockname()[1]}"])
    assert result.exit_code == 2
    assert "cannot be used" in result.stderr
    assert result.stderr.count("\n") == 1
