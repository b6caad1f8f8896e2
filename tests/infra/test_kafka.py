"""What a developer is told when Kafka cannot be started: one line that says what to do."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infra.kafka import kafka
from infra.kafka.kafka import HOST, Broker, BrokerError, fetch_jars, find_java, start


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return folder


def program(folder: Path, name: str, says: str, code: int = 0) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit {code}\n")
    path.chmod(0o755)


def test_java_is_missing(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BrokerError, match="no java on PATH: install"):
        find_java()
    monkeypatch.setenv("JAVA_HOME", str(programs))
    with pytest.raises(BrokerError, match="no java in JAVA_HOME"):
        find_java()


@pytest.mark.parametrize(
    ("says", "version"),
    [('openjdk version "11.0.2"', "11"), ('java version "1.8.0_202"', "8"), ("what?", "of an unknown version")],
)
def test_java_is_too_old(programs: Path, says: str, version: str) -> None:
    program(programs, "java", says)
    with pytest.raises(BrokerError, match=f"Java 17 or newer, and .* is {version}$"):
        find_java()


@pytest.mark.parametrize("says", ['openjdk version "17.0.15" 2025-04-15', 'openjdk version "25" 2025-09-16'])
def test_java_is_new_enough(programs: Path, says: str) -> None:
    program(programs, "java", says)
    assert find_java() == str(programs / "java")


def test_maven_is_missing_or_fails(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "LIB", tmp_path / "kafka" / "lib")
    with pytest.raises(BrokerError, match="no mvn on PATH: install Maven"):
        fetch_jars()
    program(programs, "mvn", "[ERROR] nothing can be reached\n[ERROR] at all", code=1)
    with pytest.raises(BrokerError, match=r"Maven cannot fetch Kafka: \[ERROR\] nothing can be reached$"):
        fetch_jars()
    assert list((tmp_path / "kafka").iterdir()) == []


def test_a_port_is_in_use(programs: Path, tmp_path: Path) -> None:
    program(programs, "java", 'openjdk version "17"')
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BrokerError, match=f"port {port} is in use: stop what listens there"):
            start(Broker(port, tmp_path / "data"))
    assert not (tmp_path / "data").exists()


def test_nothing_runs(tmp_path: Path) -> None:
    script = [sys.executable, kafka.__file__]
    for action, code, says in (("status", 1, "not running"), ("stop", 0, "was not running")):
        done = subprocess.run([*script, action, "--data", tmp_path], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, f"kafka: {says}\n")


@pytest.mark.parametrize("login", ["ann", "ann:", ":secret", 'ann:"'])
def test_a_login_that_kafka_could_not_read_is_refused(login: str) -> None:
    command = [sys.executable, kafka.__file__, "start", "--sasl", login]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "give USER:PASSWORD" in done.stderr
