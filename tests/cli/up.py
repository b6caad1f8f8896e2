"""Run `forebay up` in a separate process, for tests that send requests to it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from forebay.ingress.model import DEFAULT_MODEL
from tests.cli import in_process
from tests.harness import fork_server
from tests.harness.fork_server import ForkedProcess
from tests.harness.local import free_ports

ROOT = Path(__file__).parents[2]
FOREBAY = str(Path(sys.executable).with_name("forebay"))
PATIENCE_S = 60.0
ADMIN_TOKEN = "token-of-tests"
ADMIN = {"authorization": f"Bearer {ADMIN_TOKEN}"}
LONG_PREFIX = "The log is the truth, and every decision on it can be derived again. " * 40


def children_of(pid: int) -> list[int]:
    """Return the ids of the child processes of a process."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


class Up:
    """A running `forebay up`."""

    def __init__(self, *options: str, program: Sequence[str] | None = None, stderr: int | None = None) -> None:
        self.port = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        speed = [] if "--engine" in options else ["--speedup", "50"]
        command = ["up", "--port", str(self.port), *speed, *options]
        environment = {**os.environ, "FOREBAY_ADMIN_TOKEN": ADMIN_TOKEN}
        self.process: ForkedProcess | subprocess.Popen[str]
        if program is None:
            self.process = fork_server.start(*command, stderr=stderr, environment=environment)
        else:
            self.process = subprocess.Popen(
                [*program, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )

    def wait_ready(self, patience_s: float = PATIENCE_S) -> None:
        ends_s = time.monotonic() + patience_s
        with httpx.Client(base_url=self.url, timeout=5) as client:
            while time.monotonic() < ends_s:
                assert self.process.poll() is None, self.process.communicate()[0]
                try:
                    if client.get("/ready").status_code == httpx.codes.OK:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.02)
        raise AssertionError("not ready")

    def banner(self) -> str:
        """Return the output up to the line that contains the address."""
        assert self.process.stdout is not None
        output = ""
        while "stop with Ctrl-C" not in output:
            line = self.process.stdout.readline()
            assert line, output
            output += line
        return output

    def metric(self, start: str) -> float:
        """Return the sum of the samples whose lines begin with `start`."""
        shown = httpx.get(f"{self.url}/metrics", timeout=30).text
        lines = [line for line in shown.splitlines() if line.startswith(start)]
        assert lines, f"there is no metric {start}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def children(self) -> list[int]:
        """Return the ids of the child processes."""
        return children_of(self.process.pid)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode is not None
        return self.process.returncode


@contextmanager
def running(*options: str, stderr: int | None = None) -> Iterator[Up]:
    up = Up(*options, stderr=stderr)
    try:
        up.wait_ready()
        yield up
    finally:
        if up.process.poll() is None:
            up.end(signal.SIGKILL)


def forebay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run(*arguments, timeout_s=PATIENCE_S)


def verified(log: Path) -> dict[str, object]:
    """Return the verification report of a log, in a process with another hash seed than its writer."""
    run = in_process.forebay("verify", str(log), "--json")
    assert run.returncode == 0, run.stdout + run.stderr
    report: dict[str, object] = json.loads(run.stdout)
    assert report["decisions"] == report["verified"]
    assert report["divergence"] is None
    return report


def fake_up(folder: Path, arguments: dict[str, Any], *options: str) -> Up:
    """Start `forebay up` with fake engines, which are configured by `arguments`, in place of vLLM."""
    program = folder / "program.py"
    program.write_text(
        "import sys\n"
        f"sys.path.append({str(ROOT)!r})\n"
        "from forebay.workers.engines import adapters as engines\n"
        "from forebay.cli.app import main\n"
        "from tests.cli.fake_engine import FAKE\n"
        "engines.ADAPTERS['vllm'] = FAKE\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    engine = ["--engine", "vllm", "--model", str(DEFAULT_MODEL), "--engine-args", json.dumps(arguments)]
    return Up(*engine, *options, program=[sys.executable, str(program)])
