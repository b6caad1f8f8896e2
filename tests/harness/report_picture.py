"""Create the README's picture of a report: `python -m tests.harness.report_picture TRACE` simulates a trace."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.harness.browser import launched, opened

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "simulate-report.png"
POLICIES = ("kv", "round-robin", "least-loaded")
WIDTH, HEIGHT = 1_200, 1_160
SCALE = 1.5  # sharp on most screens, and still a small file


def main() -> None:
    """Simulate the trace of the command line with 8 workers and write the picture of its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    trace = parser.parse_args().trace
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        chosen = [word for name in POLICIES for word in ("--policy", name)]
        command = [
            sys.executable,
            "-m",
            "forebay.cli",
            "simulate",
            trace,
            "--workers",
            "8",
            *chosen,
            "--report",
            report,
        ]
        subprocess.run(command, check=True)
        PICTURE.parent.mkdir(exist_ok=True)
        with launched() as browser, opened(report, browser, width=WIDTH, height=HEIGHT, scale=SCALE) as found:
            found.page.wait_for_selector("html[data-drawn=all]")
            found.page.screenshot(path=PICTURE)


if __name__ == "__main__":
    main()
