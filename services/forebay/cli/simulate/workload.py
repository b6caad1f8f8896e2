"""`forebay workload show` and `convert`: statistics of a workload, and conversion to forebay's own format."""

from array import array
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.box import SIMPLE
from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.survey import print_survey
from forebay.cli.common.tables import bar, in_markup, print_result, results, table
from forebay.cli.simulate.command import WorkloadConvertCommand, WorkloadShowCommand
from forebay.cli.simulate.options import workload_options
from forebay.runtime.files import replacing
from forebay.simulate.outcome import percentiles
from forebay.simulate.reading import open_workload
from forebay.simulate.workload import Turn, Workload, WorkloadOptions
from forebay.simulate.workloads.rows import WorkloadHeader, encode_workload
from forebay.simulate.workloads.source import LATEST_US, US_PER_S

MODELS = 2  # keep the model names of the requests
SPREADS = ("prompt_tokens", "output_tokens", "delay_s")
SHOWN = ("mean", "p50", "p90", "p99", "max")
FOUND_IDS_MAX = 1 << 24  # maximum number of distinct block ids to remember, about 100 bytes each


def run_show(options: WorkloadShowCommand) -> None:
    with explained():
        workload = open_workload(options.workload, workload_options(options.shape, options.seed, models=MODELS))
        survey = workload.survey()
        found = workload_statistics(_watched(workload, survey.requests, "read"), workload.block_tokens)
    print_survey(survey)
    output = {"name": workload.name, "block_tokens": workload.block_tokens, **msgspec.to_builtins(found)}
    output["skipped"] = survey.skipped
    print_result(output, options.json, lambda: _show(workload.name, found))


def run_convert(options: WorkloadConvertCommand) -> None:
    shape = workload_options(options.shape, options.seed, models=MODELS)
    if options.out.exists() and not options.out.is_file():  # replacing a device would turn it into a file
        fail(f"{options.out}: is not a regular file; choose another name")
    with explained():
        workload = open_workload(options.workload, shape)
        survey = workload.survey()
        # The header has no name, so that tables show the current name of the file.
        header = WorkloadHeader(block_tokens=workload.block_tokens, source=_source(options.workload, shape))
        try:
            with replacing(options.out) as file:
                file.writelines(encode_workload(_watched(workload, survey.requests, "written"), header))
        except OSError as error:
            fail(f"{options.out}: cannot be written ({error.strerror})")
    print_survey(survey)
    click.echo(f"{options.out}: {survey.requests} requests", err=True)


def _watched(workload: Workload, total: int, done: str) -> Iterable[Turn]:
    """Yield the requests of a workload with a progress bar on stderr."""
    with bar(TextColumn(done), MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        yield from progress.track(workload.turns(), total=total)


def _source(name: str, options: WorkloadOptions) -> str:
    """Return a description of a file's origin: its name without folders, and the options that are not defaults."""
    plain = WorkloadOptions(by_model=True)
    changed = {
        name: value for name in options.__struct_fields__ if (value := getattr(options, name)) != getattr(plain, name)
    }
    known = name if name.startswith("synthetic:") else Path(name).name
    return " ".join([known, *(f"{name}={value}" for name, value in changed.items())])


def _show(name: str, found: "WorkloadStatistics") -> None:
    reuse = found.ideal_reuse
    bound = "" if reuse.whole else " (lower bound: too many distinct blocks to remember)"
    facts = Table(title=in_markup(name), box=SIMPLE, show_header=False, title_justify="left")
    facts.add_row("requests", f"{found.requests}, {found.requests - found.own_times} of them dependent on responses")
    facts.add_row("duration", f"{found.duration_s:.1f} s{' if responses were instant' if found.delay_s else ''}")
    facts.add_row("rate", f"{found.rate_per_s:.3f}/s")
    facts.add_row("ideal reuse", f"{reuse.tokens:.4f} of tokens{bound}")
    facts.add_row("blocks", f"{reuse.distinct_blocks} distinct")

    results().print(facts)
    lengths = table("", ("", *SHOWN))
    for spread_of in SPREADS:
        if values := getattr(found, spread_of):
            lengths.add_row(spread_of, *(f"{values[one]:,.1f}".removesuffix(".0") for one in SHOWN))
    results().print(lengths)


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix reuse in one unbounded cache, if requests run one after another in order. No policy can reach more."""

    tokens: float  # share of the prompt tokens that are found in the cache
    distinct_blocks: int
    # Whether all block ids were remembered. False if there were more than `FOUND_IDS_MAX`, so the reuse is
    # underestimated.
    whole: bool


class WorkloadStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a workload: arrivals, lengths and prefix reuse.

    Distributions are dicts of mean, p50, p90, p99 and max.
    """

    requests: int
    own_times: int  # number of requests with a fixed arrival time. The other requests wait for responses.
    duration_s: float  # seconds from the first to the last arrival, computed as if every response were instant
    rate_per_s: float  # mean arrivals per second
    prompt_tokens: dict[str, float]
    output_tokens: dict[str, float]  # distribution of response lengths
    # Distribution of the delays between a response and a request that waits for it, in seconds.
    delay_s: dict[str, float]
    ideal_reuse: Reuse  # upper bound of prefix reuse


def workload_statistics(turns: Iterable[Turn], block_tokens: int) -> WorkloadStatistics:
    """Return the statistics of a workload. Errors of its iterator propagate."""
    earliest_us, delays_us = array("q"), array("q")
    prompts, outputs = array("q"), array("q")
    seen: set[int] = set()
    found_tokens = 0
    for turn in turns:
        before_us = max((earliest_us[one] for one in turn.after), default=0)
        earliest_us.append(min(max(turn.at_us, before_us + turn.delay_us), LATEST_US))
        if turn.after:
            delays_us.append(turn.delay_us)
        prompts.append(turn.prompt_tokens)
        outputs.append(turn.output_tokens)
        blocks = -(-turn.prompt_tokens // block_tokens)
        found = sum(1 for _ in takewhile(seen.__contains__, turn.block_ids[:blocks]))
        found_tokens += min(found * block_tokens, turn.prompt_tokens)
        if len(seen) < FOUND_IDS_MAX:
            seen.update(turn.block_ids)
    first_us, last_us = min(earliest_us), max(earliest_us)
    return WorkloadStatistics(
        requests=len(prompts),
        own_times=len(prompts) - len(delays_us),
        duration_s=(last_us - first_us) / US_PER_S,
        rate_per_s=len(prompts) / ((last_us - first_us) / US_PER_S) if last_us > first_us else 0.0,
        prompt_tokens=_spread(prompts),
        output_tokens=_spread(outputs),
        delay_s=_spread(delays_us, US_PER_S),
        ideal_reuse=Reuse(
            tokens=found_tokens / sum(prompts),
            distinct_blocks=len(seen),
            whole=len(seen) < FOUND_IDS_MAX,
        ),
    )


def _spread(values: "array[int]", unit: int = 1) -> dict[str, Any]:
    if not values:
        return {}
    ordered = [one / unit for one in values]
    return {**percentiles(ordered), "max": max(ordered)}
