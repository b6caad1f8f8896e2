"""Notes on a workload and its skipped rows, on stderr."""

from collections.abc import Iterator

from rich.console import Console

from forebay.cli.common.terminal import printable
from forebay.simulate.workload import Survey


def print_survey(survey: Survey) -> None:
    """Print notes on the workload, and its skipped rows, on stderr."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for line in survey_lines(survey):
        console.print(printable(line))


def survey_lines(survey: Survey) -> Iterator[str]:
    """Yield the notes on the workload, and a line per skipped row up to the limit of the survey."""
    yield from survey.notes
    yield from (f"skipped: {row}" for row in survey.reasons)
    if survey.skipped > len(survey.reasons):
        yield f"skipped: {survey.skipped - len(survey.reasons)} more rows"
