"""`forebay serve`: resources of each process, rejected settings and shutdown."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.processes.serve import Share, devices, run_shares, shares
from forebay.ingress.errors import Unusable
from forebay.workers.service import Request, Service, endpoint, service, service_of
from tests.harness import fork_server
from tests.harness.local import free_ports

PATIENCE_S = 60.0
ENGINE = """
from forebay.workers.service import endpoint, service

@service(namespace="test", workers=2, resources=RESOURCES)
class Engine:
    @endpoint()
    async def generate(self, request):
        yield 1
"""


def made(name: str, **options: Any) -> Service:
    class Engine:
        @endpoint()
        async def generate(self, request: Request):  # type: ignore[no-untyped-def]
            yield 1

    Engine.__module__ = f"tests.{name}"
    found = service_of(service(namespace="test", **options)(Engine))
    assert found is not None
    return found


def test_each_process_has_its_own_id_port_threads_and_gpus() -> None:
    found = shares(made("all", resources={"cpu": "1.5", "gpu": 2}), 2, "host-7", 9000, ["4", "5", "GPU-uuid", "7", "8"])
    assert [share.worker_id for share in found] == ["host-7-0", "host-7-1"]
    assert [share.options for share in found] == [
        ("--id", "host-7-0", "--metrics-port", "9000"),
        ("--id", "host-7-1", "--metrics-port", "9001"),
    ]
    assert [share.environment for share in found] == [
        {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "4,5"},
        {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "GPU-uuid,7"},
    ]


def test_unset_resources_keep_the_environment() -> None:
    (share,) = shares(made("none"), 1, "w", None, ["0", "1"])
    assert (share.options, share.environment) == (("--id", "w-0"), {})


@pytest.mark.parametrize(
    ("visible", "nodes", "found"),
    [
        ("0, 2", 8, ["0", "2"]),
        ("GPU-a,GPU-b", 0, ["GPU-a", "GPU-b"]),
        ("", 8, []),
        (None, 3, ["0", "1", "2"]),
        (None, 0, []),
    ],
)
def test_gpus_default_to_visible_or_all_devices(
    tmp_path: Path, visible: str | None, nodes: int, found: list[str]
) -> None:
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(nodes))):
        (tmp_path / name).touch()
    assert devices({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == found


def test_too_few_gpus_or_ports_are_rejected() -> None:
    with pytest.raises(Unusable, match=r"test\.engine: 3 workers with 2 GPUs each need 6, and 5 are visible"):
        shares(made("gpus", resources={"gpu": 2}), 3, "w", None, list("01234"))
    with pytest.raises(Unusable, match="--metrics-port 65535: 2 workers need ports above the maximum of 65535"):
        shares(made("ports"), 2, "w", 65_535, [])


def engine(folder: Path, resources: str = "None") -> str:
    file = folder / "engine.py"
    file.write_text(ENGINE.replace("RESOURCES", resources))
    return f"{file}:Engine"


def serve(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return fork_server.run("serve", *arguments, environment={**os.environ, **environment}, timeout_s=PATIENCE_S)


def test_a_service_that_cannot_start_gives_the_reason(tmp_path: Path) -> None:
    run = serve(engine(tmp_path, '{"gpu": 1}'), CUDA_VISIBLE_DEVICES="0")
    assert (run.returncode, run.stdout) == (2, "")
    assert "test.engine: 2 workers with 1 GPUs each need 2, and 1 are visible" in run.stderr
    run = serve("nowhere.py:Engine")
    assert (run.returncode, run.stderr) == (2, "forebay: nowhere.py: no such file\n")


@pytest.mark.slow
def test_the_exit_code_is_the_highest_of_the_processes(tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_ports(1)}"
    run = serve(engine(tmp_path), "--id", "w", "--kafka", nobody)
    assert run.returncode == 2
    ended = [line for line in run.stderr.splitlines() if line.startswith("forebay: worker w-")]
    assert sorted(ended) == [f"forebay: worker w-{number} ended with code 2" for number in range(2)]
    # Each worker rejects an unknown option.
    assert "unknown option '--nonsense'" in serve(engine(tmp_path), "--nonsense").stderr


@contextmanager
def silent_broker() -> Iterator[socket.socket]:
    """Accept connections and never respond, so that clients wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process(tmp_path: Path, number: signal.Signals) -> None:
    with silent_broker() as broker:
        address = f"127.0.0.1:{broker.getsockname()[1]}"
        process = fork_server.start("serve", engine(tmp_path), "--id", "w", "--kafka", address, stderr=subprocess.PIPE)
        connections = [broker.accept()[0] for _ in range(2)]
        process.send_signal(number)
        _, output = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, output) == (0, "")
        for connection in connections:
            connection.settimeout(PATIENCE_S)
            while connection.recv(4096):  # until the peer process has ended
                pass
            connection.close()


async def test_a_process_starting_during_the_signal_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    start = asyncio.create_subprocess_exec

    async def start_during_signal(*_: str, **__: Any) -> asyncio.subprocess.Process:
        os.kill(os.getpid(), signal.SIGTERM)
        # Several iterations of the event loop; the signal arrives in the first.
        return await start(sys.executable, "-c", "import time; time.sleep(999)")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_during_signal)
    async with asyncio.timeout(PATIENCE_S):
        assert await run_shares([Share("w-0", (), {}), Share("w-1", (), {})], []) == 0


def test_the_processes_end_if_the_command_is_killed(tmp_path: Path) -> None:
    with silent_broker() as broker:
        address = f"127.0.0.1:{broker.getsockname()[1]}"
        process = fork_server.start("serve", engine(tmp_path), "--workers", "1", "--kafka", address)
        connection = broker.accept()[0]
        process.kill()
        process.communicate()
        connection.settimeout(PATIENCE_S)
        ends_s = time.monotonic() + PATIENCE_S
        while connection.recv(4096):
            assert time.monotonic() < ends_s
        connection.close()
