"""If Kafka cannot be started, the error is one line that names the remedy."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infra.kafka import kafka
from infra.kafka.kafka import HOST, Broker, BrokerError, fetch_jars, find_java, start


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that is the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return folder


def program(folder: Path, name: str, output: str, code: int = 0) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}' >&2\nexit {code}\n")
    path.chmod(0o755)


def test_a_missing_java_is_reported(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BrokerError, match="no java on PATH: install"):
        find_java()
    monkeypatch.setenv("JAVA_HOME", str(programs))
    with pytest.raises(BrokerError, match="no java in JAVA_HOME"):
        find_java()


@pytest.mark.parametrize(
    ("output", "version"),
    [('openjdk version "11.0.2"', "11"), ('java version "1.8.0_202"', "8"), ("what?", "of an unknown version")],
)
def test_an_old_java_is_rejected(programs: Path, output: str, version: str) -> None:
    program(programs, "java", output)
    with pytest.raises(BrokerError, match=f"Java 17 or newer, and .* is {version}$"):
        find_java()


@pytest.mark.parametrize("output", ['openjdk version "17.0.15" 2025-04-15', 'openjdk version "25" 2025-09-16'])
def test_a_new_java_is_accepted(programs: Path, output: str) -> None:
    program(programs, "java", output)
    assert find_java() == str(programs / "java")


def test_a_missing_or_failing_maven_is_reported(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "LIB", tmp_path / "kafka" / "lib")
    with pytest.raises(BrokerError, match="no mvn on PATH: install Maven"):
        fetch_jars()
    program(programs, "mvn", "[ERROR] nothing can be reached\n[ERROR] at all", code=1)
    with pytest.raises(BrokerError, match=r"Maven cannot fetch Kafka: \[ERROR\] nothing can be reached$"):
        fetch_jars()
    assert [one.name for one in (tmp_path / "kafka").iterdir()] == ["lock"]


def test_a_port_in_use_is_reported(programs: Path, tmp_path: Path) -> None:
    program(programs, "java", 'openjdk version "17"')
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BrokerError, match=f"port {port} is in use: stop what listens there"):
            start(Broker(port, tmp_path / "data"))
    assert not (tmp_path / "data").exists()


def test_status_and_stop_report_that_nothing_runs(tmp_path: Path) -> None:
    script = [sys.executable, kafka.__file__]
    for action, code, output in (("status", 1, "not running"), ("stop", 0, "was not running")):
        done = subprocess.run([*script, action, "--data", tmp_path], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, f"kafka: {output}\n")


@pytest.mark.parametrize("login", ["ann", "ann:", ":secret", 'ann:"'])
def test_a_login_that_kafka_cannot_parse_is_rejected(login: str) -> None:
    command = [sys.executable, kafka.__file__, "start", "--sasl", login]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "give USER:PASSWORD" in done.stderr
