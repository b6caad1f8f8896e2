"""Owned processes end with their parent, at whatever moment it dies, and have their own environment. Without vLLM."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Starts a process that starts another one. Each prints its pid and blocks. A child "in its imports" blocks before
# it has come to what it is to do: unpickling its arguments does.
SCRIPT = """
import multiprocessing, os, sys, threading
from forebay.workers.engines.vllm.processes import owning

def say():
    os.write(1, f"{os.getpid()} {os.environ.get('PORT')}\\n".encode())

def block():
    say()
    threading.Event().wait()

class Slow:
    def __reduce__(self):
        return block, ()

def is_stranger():
    os._exit(1 if 'PORT' in os.environ else 7)

def outer():
    multiprocessing.get_context("spawn").Process(target=block).start()
    block()

if __name__ == "__main__":
    owned = []
    context = multiprocessing.get_context("spawn")
    with owning(owned, {'PORT': '5600'}):
        if sys.argv[1] == "imports":
            context.Process(target=print, args=(Slow(),)).start()
        else:
            context.Process(target=outer).start()
    say()
    stranger = context.Process(target=is_stranger)
    stranger.start()
    stranger.join()
    assert stranger.exitcode == 7
    assert [one.is_alive() for one in owned] == [True]
    threading.Event().wait()
"""


@pytest.mark.parametrize(("where", "processes"), [("run", 3), ("imports", 2)])
def test_an_owned_process_ends_with_its_parent(where: str, processes: int, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), where]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as owner:
        try:
            assert owner.stdout is not None
            said = dict(owner.stdout.readline().split() for _ in range(processes))
            assert said.pop(str(owner.pid)) == "None"
            assert list(said.values()) == ["5600"] * (processes - 1)
        finally:
            owner.send_signal(signal.SIGKILL)
        # Each has the other end of stdout: it closes when the last of them ends.
        owner.stdout.read()
