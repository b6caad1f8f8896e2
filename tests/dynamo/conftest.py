"""A Dynamo peer process. Skipped unless FOREBAY_DYNAMO_PYTHON names a Python with ai-dynamo 1.6."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "FOREBAY_DYNAMO_PYTHON"
PEER = Path(__file__).with_name("peer.py")


class Dynamo:
    """A running peer process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def __call__(self, call: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([call, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"{call}{arguments} ended the peer"
        return json.loads(line)


@contextmanager
def dynamo_with(**environment: str) -> Iterator[Dynamo]:
    """Start a peer with these environment variables."""
    python = os.environ.get(VARIABLE)
    if python is None:
        pytest.skip(f"{VARIABLE} does not name a Python with ai-dynamo")
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [python, str(PEER)],
        env={**inherited, "DYN_LOG": "error", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Dynamo(process)
        finally:
            process.kill()
