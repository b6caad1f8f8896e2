"""Profile running services with py-spy, and sum the samples by part of the code.

py-spy (`pip install py-spy`) reads the stacks of another process. Only samples of threads that hold the GIL count. A
sample belongs to the part of its innermost frame that `PARTS` names, so the time of a library counts for its caller.
"""

import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

RATE = 200  # samples per second
FRAME = re.compile(r"(.+) \((.+?)(?::\d+)?\)$")
REST = "event loop, and rest"
# The first match wins: part of the file path, and its name in the table.
PARTS: tuple[tuple[str, str], ...] = (
    ("/faust/", "Faust"),
    ("/mode/", "Faust"),
    ("/aiokafka/", "Kafka"),
    ("forebay/transport/kafka/", "Kafka"),
    ("forebay/transport/redis/", "leases"),
    ("/redis/", "leases"),
    ("forebay/events/", "encoding and decoding of events"),
    ("forebay/core/", "core: state, costs, selection"),
    ("forebay/live/", "owner: turns, journal, effects"),
    ("forebay/engine_model/", "mock engine"),
    ("forebay/workers/engines/", "mock engine"),
    ("forebay/workers/", "worker: work, tokens, reports"),
    ("forebay/ingress/http/", "HTTP"),
    ("/uvicorn/", "HTTP"),
    ("/starlette/", "HTTP"),
    ("/fastapi/", "HTTP"),
    ("forebay/ingress/openai/", "OpenAI API: validation, JSON"),
    ("/pydantic/", "OpenAI API: validation, JSON"),
    ("forebay/ingress/tokenizer.py", "tokenization"),
    ("forebay/ingress/word_tokens.py", "tokenization"),
    ("forebay/ingress/token_bytes.py", "tokenization"),
    ("forebay/ingress/prepare.py", "ingress: request for the log"),
    ("forebay/ingress/", "ingress: responses, and rest"),
    ("forebay/transport/", "log, apart from Kafka"),
    ("/prometheus_client/", "metrics"),
)


@dataclass(slots=True)
class Profile:
    """The profile of a process.

    Attributes:
        parts: number of samples with the GIL, by part.
        samples_max: number of samples that a process that always holds the GIL would have.
    """

    parts: Counter[str]
    samples_max: float


@contextmanager
def profiled(pyspy: str, pids: Mapping[str, int], folder: Path) -> Iterator[dict[str, Profile]]:
    """Sample processes meanwhile; the yielded dict has their profiles by name afterwards.

    Raises SystemExit if py-spy fails.
    """
    found: dict[str, Profile] = {}
    with ExitStack() as stack:
        running: dict[str, subprocess.Popen[str]] = {}
        for name, pid in pids.items():
            options = ("--full-filenames", "--gil", "--rate", str(RATE), "--format", "raw", "--pid", str(pid))
            command = [pyspy, "record", *options, "--output", str(folder / f"{name}.profile")]
            running[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            stack.callback(running[name].kill)
        began_s = time.monotonic()
        yield found
        took_s = time.monotonic() - began_s
        for process in running.values():
            process.send_signal(signal.SIGINT)
        for name, process in running.items():
            _, errors = process.communicate()
            if process.returncode:
                raise SystemExit(f"py-spy failed on {name}: {errors.strip()}; it may need root")
            found[name] = Profile(parts_of(folder / f"{name}.profile"), took_s * RATE)


def parts_of(path: Path) -> Counter[str]:
    """Return the number of samples by part in a file that py-spy wrote with `--format raw`."""
    found: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        parts = (part_of(frame) for frame in reversed(stack.split(";")))
        found[next((part for part in parts if part is not None), REST)] += int(count)
    return found


def part_of(frame: str) -> str | None:
    """Return the part of a frame, or None if its time counts for its caller."""
    matched = FRAME.match(frame)
    path = matched[2] if matched else ""
    return next((part for place, part in PARTS if place in path), None)


def print_profiles(found: Mapping[str, Profile]) -> None:
    """Print the share of each part in the samples with the GIL, and how much of the time the GIL was held."""
    print(f"| share of the samples with the GIL | {' | '.join(found)} |\n|---{'|---:' * len(found)}|")
    totals = {name: sum(profile.parts.values()) for name, profile in found.items()}
    shares = {name: {part: n / totals[name] for part, n in one.parts.items()} for name, one in found.items()}
    largest: dict[str, float] = {}
    for one in shares.values():
        for part, share in one.items():
            largest[part] = max(share, largest.get(part, 0.0))
    for part in sorted(largest, key=lambda part: -largest[part]):
        print(f"| {part} | {' | '.join(f'{one[part]:.0%}' if part in one else '' for one in shares.values())} |")
    held = [f"{totals[name] / profile.samples_max:.0%}" for name, profile in found.items()]
    print(f"| GIL held, of the time | {' | '.join(held)} |")
