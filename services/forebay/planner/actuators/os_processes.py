"""Processes of this machine that outlive their parent. Linux only.

Theory of operation. The kernel reuses process ids. So a process is identified by its pid, its start time and the boot
of the machine, and a signal goes through a file descriptor of the process (pidfd). A started process writes its
identity to a file before it executes its command. Until then it keeps the lock of its parent. So if the parent is
killed at any moment, the next holder of the lock finds a file for every running command.
"""

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SHELL = "/bin/sh"
PROC = Path("/proc")
BOOT_ID = PROC / "sys/kernel/random/boot_id"
START_FIELD = 19  # index of the start time in /proc/PID/stat, counted after the name of the process
ENDED_STATES = ("Z", "X")  # zombie and dead
# The lock is the standard input of the shell, so the last redirection releases it.
_RECORD_AND_EXECUTE = (
    f"read -r boot <{BOOT_ID} && read -r stat </proc/$$/stat && "
    'printf "%s\\n%s\\n" "$boot" "$stat" >"$0.new" && mv -f "$0.new" "$0" && exec "$@" </dev/null'
)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identity of a process, which no other process ever has."""

    pid: int
    start_ticks: int  # start time in clock ticks since the boot
    boot: str


def start_process(
    command: Sequence[str], *, record: Path, output: Path, lock: int, environment: Mapping[str, str]
) -> ProcessIdentity:
    """Start a command as the leader of a session of its own. Raises OSError if no process can be started.

    The process writes its identity to `record`, and keeps the lock with the file descriptor `lock` until then. The
    output of the command is appended to `output`.
    """
    pid = os.posix_spawn(
        SHELL,
        [SHELL, "-c", _RECORD_AND_EXECUTE, str(record), *command],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 1, str(output), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            (os.POSIX_SPAWN_DUP2, lock, 0),
        ],
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGPIPE),  # a shell starts background jobs with SIGINT ignored
    )
    try:
        # A child that has ended stays in /proc until `exit_code` is called.
        _, start_ticks = _parse_stat((PROC / str(pid) / "stat").read_text())
        return ProcessIdentity(pid, start_ticks, boot_id())
    except OSError:  # for example, because too many files are open
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def recorded_identity(record: Path) -> ProcessIdentity | None:
    """Return the identity in a file that a process has written. None if there is no complete file."""
    try:
        boot, stat, *_ = record.read_text().splitlines()
        _, start_ticks = _parse_stat(stat)
        return ProcessIdentity(int(stat.split(maxsplit=1)[0]), start_ticks, boot)
    except (FileNotFoundError, ValueError, IndexError):
        return None


def boot_id() -> str:
    return BOOT_ID.read_text().strip()


def is_running(identity: ProcessIdentity) -> bool:
    try:
        state, start_ticks = _parse_stat((PROC / str(identity.pid) / "stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return False
    return (start_ticks, boot_id()) == (identity.start_ticks, identity.boot) and state not in ENDED_STATES


def exit_code(identity: ProcessIdentity) -> int | None:
    """Return the exit code of a child that has ended, negative for a signal. None if it is not a child."""
    with contextlib.suppress(ChildProcessError):
        pid, status = os.waitpid(identity.pid, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
    return None


def terminate(identity: ProcessIdentity) -> None:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(identity.pid)
        try:
            if is_running(identity):  # otherwise the descriptor may be of a process that reuses the pid
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        finally:
            os.close(descriptor)


def kill_session(identity: ProcessIdentity) -> None:
    """Send SIGKILL to the process and the children in its process group, unless it has ended."""
    if is_running(identity):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(identity.pid, signal.SIGKILL)


def _parse_stat(text: str) -> tuple[str, int]:
    """Return state and start time of a line of /proc/PID/stat. The name in parentheses may contain anything."""
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[START_FIELD])
