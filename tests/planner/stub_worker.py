"""A worker process for tests of the supervisor, without a log or an engine. Files in its folder control it.

It writes a line to `starts` once SIGTERM is handled, and to `signals` for each SIGTERM. It ends at once if the file
`crash` or `crash-ID` exists, and ends at SIGTERM unless the file `hold` exists, then once that is removed.
"""

import os
import signal
import sys
from pathlib import Path

CRASH_CODE = 3


def main(folder: Path, worker_id: str) -> None:
    def on_signal(*_: object) -> None:
        append(folder / "signals", worker_id)

    signal.signal(signal.SIGTERM, on_signal)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    append(folder / "starts", f"{worker_id} {os.getpid()}")
    print(f"worker {worker_id} is running", flush=True)
    if any((folder / name).exists() for name in ("crash", f"crash-{worker_id}")):
        sys.exit(CRASH_CODE)
    signal.sigwait([signal.SIGTERM])
    on_signal()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    while (folder / "hold").exists():
        signal.sigtimedwait([signal.SIGALRM], 0.01)


def append(path: Path, line: str) -> None:
    """Append a line in one write, because several workers append."""
    with path.open("a") as file:
        file.write(f"{line}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[sys.argv.index("--id") + 1])
