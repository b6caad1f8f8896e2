"""`forebay up --console`: the console is a process of its own, whose failure does not end the system."""

import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.cli.up import FOREBAY, Up


@pytest.mark.slow
def test_a_console_without_its_port_does_not_end_the_system(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ("--workers", "1", "--log", str(tmp_path / "log"), "--console", "--console-port", str(port))
        up = Up(*options, program=[FOREBAY])
        try:
            assert up.process.stdout is not None
            output = ""
            while "cannot listen" not in output:
                line = up.process.stdout.readline()
                assert line, output
                output += line
            assert f"127.0.0.1:{port} (Address already in use" in output and "; choose another --console-port" in output
            assert httpx.get(f"{up.url}/v1/models").status_code == httpx.codes.OK
        finally:
            up.process.send_signal(signal.SIGTERM)
            rest = up.process.communicate(timeout=60)[0]
        assert "Traceback" not in output + rest
        assert "Fatal Python error" not in output + rest
        assert up.process.returncode == 0
