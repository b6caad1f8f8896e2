"""Run the command blocks of README and docs. `python -m tests.cli.pages` updates the output in docs/cookbook.md.

A word after ```` ```sh ````, which a reader does not see, says how a block runs. None: in one shell per page.
`server`: its last command runs until the next such block or the page's end, and the next block starts once it is ready.
`kafka`: in tests/integration, after the blocks of docs/distributed.md. A reason of `REASONS`: not at all. A block whose
word is a file name is written to this file, and `python run` is a program. A comment `<!-- sh … -->` is a block that
sets up what the page assumes. The folder looks like a checkout.

In docs/cookbook.md each section has a folder of its own, with the files of the first section, and a `text` block after
an `sh` block is its output.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.harness.local import free_ports

ROOT = Path(__file__).resolve().parents[2]
COOKBOOK = ROOT / "docs/cookbook.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
BLOCK = re.compile(
    r"^(?P<fence>```|<!-- )(?P<language>sh|python|toml|json)(?: (?P<word>\S+))?\n(?P<text>.*?)^(?:```|-->)$"
    r"(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
REASONS = {
    "gpu": "needs an engine on a GPU, or model weights",
    "hosts": "needs other hosts",
    "network": "needs a file or packages of the network",
    "tool": "needs a program that is not in .venv",
    "checks": "runs tests, benchmarks or checks of the repository, which CI runs itself",
}
COLUMNS = "110"  # width of a page without scrolling
TIMEOUT_S = 800  # the longest takes one minute on an idle machine, that of Kafka four
MARK = re.compile(r"^== \d+\n", re.MULTILINE)
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d{4,5}\b|(?<=port )\d{4,5}\b|(?<=port = )\d{4,5}\b")
PLACEHOLDERS = {
    r"\bchatcmpl-…|\bREQUEST[-_]ID\b": "$(printed '(chat)?cmpl-[0-9a-f]+|route-[0-9a-f]+')",
}
PRELUDE = """
printed() { grep -oE -- "$1" printed.txt | tail -1; }
stopped() { if [ -n "${server:-}" ]; then kill $server; wait $server || true; fi; }
fresh() {
    pkill -KILL -P $$ -f bin/forebay
    while pgrep -P $$ -f bin/forebay; do sleep 0.1; done
    export FOREBAY_NAMESPACE=$1
}
ready() { until curl -skf -o /dev/null $1://127.0.0.1:8000/ready; do kill -0 $server; sleep 0.1; done; }
"""


class Block(NamedTuple):
    """A block of a page. `output` is None if the page shows no output."""

    fence: str
    language: str
    word: str | None
    text: str
    output: str | None

    @property
    def is_file(self) -> bool:
        return "." in (self.word or "")

    @property
    def is_shown(self) -> bool:
        return self.fence == "```"

    @property
    def runs(self) -> bool:
        return self.word == "run" or (self.language == "sh" and self.word in {None, "server"})

    def script(self) -> str:
        if self.is_file:
            return f"cat > {self.word} <<'END_OF_FILE'\n{self.text}END_OF_FILE\n"
        if self.language == "python":
            return f"python - <<'END_OF_PROGRAM'\n{self.text}END_OF_PROGRAM\n"
        if self.word == "server":
            scheme = "https" if "--ssl-certfile" in self.text else "http"
            command = re.sub(r"\s*&?\s*(?:# .*)?\n\Z", " &\n", self.text)
            return f"stopped\n{command}server=$!\nready {scheme}\n"
        return self.text


def blocks(page: str) -> list[Block]:
    return [Block(**found.groupdict()) for found in BLOCK.finditer(page)]


@contextmanager
def folder_of(parent: Path, given: Path | None = None) -> Iterator[Path]:
    """Create a folder that looks like a checkout with a built `.venv`, with the files of `given`."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        checkout = (path for path in ROOT.iterdir() if not path.name.startswith("."))
        for path in (*checkout, *(given.iterdir() if given else ())):
            if not (folder / path.name).is_symlink():
                (folder / path.name).symlink_to(path)
        if not (folder / ".venv").is_symlink():
            (folder / ".venv").mkdir()
            (folder / ".venv/bin").symlink_to(Path(sys.executable).parent)
            (folder / ".venv/.ready").touch()
        yield folder


def run(page: Iterable[Block], folder: Path) -> list[str]:
    """Run blocks in one shell and return what each printed on stdout, without trailing blanks."""
    script = PRELUDE + "".join(f"\necho '== {number}'\n{block.script()}" for number, block in enumerate(page))
    for placeholder, value in PLACEHOLDERS.items():
        script = re.sub(placeholder, value, script)
    named = sorted({*PORT.findall(script), "8000", "8100", "16379", "19092"}, key=int)
    first = free_ports(len(named) + 1)  # Kafka has the last one, and takes the next one for its controller
    ports = {name: str(first + number) for number, name in enumerate(named)}
    script = PORT.sub(lambda port: ports[port[0]], script)
    script = script.replace("make kafka", f'make kafka ARGS="--port {ports["19092"]} --data kafka"')
    environment = {
        **os.environ,
        "COLUMNS": COLUMNS,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "FOREBAY_PORT": ports["8000"],
        "FOREBAY_URL": f"http://127.0.0.1:{ports['8000']}",
        "FOREBAY_CONSOLE_PORT": ports["8100"],
    }
    if "make kafka" in script:
        environment |= {
            "FOREBAY_KAFKA": f"127.0.0.1:{ports['19092']}",
            "FOREBAY_REDIS": f"redis://127.0.0.1:{ports['16379']}",
        }
    printed, errors = folder / "printed.txt", folder / "errors.txt"
    with printed.open("w") as stdout, errors.open("w") as stderr:
        command = ["bash", "-euo", "pipefail", "-c", script]
        shell = subprocess.Popen(command, cwd=folder, env=environment, stdout=stdout, stderr=stderr)
        try:
            with suppress(subprocess.TimeoutExpired):
                shell.wait(TIMEOUT_S)
        finally:
            end_all(folder)
            returncode = shell.wait()
    text = printed.read_text()
    assert returncode == 0, f"exit code {returncode} of\n{script}\n{text[-4000:]}\n{errors.read_text()[-4000:]}"
    outputs = ["".join(f"{line.rstrip()}\n" for line in output.splitlines()) for output in MARK.split(text)[1:]]
    return [re.sub(r"\n{3,}", "\n\n", output.strip("\n") + "\n") for output in outputs]


def end_all(folder: Path) -> None:
    """Kill the processes that run in a folder: servers, and workers that outlive their supervisor."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if link.resolve().is_relative_to(folder.resolve()):
                os.kill(int(link.parent.name), signal.SIGKILL)


def recipes(page: str) -> dict[str, list[Block]]:
    """Return the blocks of each section of the cookbook that a test runs."""
    _, *parts = SECTION.split(page)
    found = {
        title: [block for block in blocks(text) if block.runs or block.is_file]
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {title: recipe for title, recipe in found.items() if any(block.runs for block in recipe)}


def renewed(page: str) -> str:
    """Return the cookbook with the current output of its commands."""
    first, *_ = found = recipes(page)
    with tempfile.TemporaryDirectory() as name, folder_of(Path(name)) as given:
        for title, recipe in found.items():
            print(title, file=sys.stderr)
            with folder_of(Path(name), None if title == first else given) as folder:
                outputs = run(recipe, given if title == first else folder)
            for block, output in zip(recipe, outputs, strict=True):
                if block.output is not None:
                    before = f"```sh\n{block.text}```\n\n```text\n"
                    page = page.replace(f"{before}{block.output}```", f"{before}{output}```")
    return page


if __name__ == "__main__":
    COOKBOOK.write_text(renewed(COOKBOOK.read_text()))
