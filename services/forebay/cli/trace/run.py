"""One run of `forebay trace`, and its results on the terminal."""

import asyncio
import statistics
from collections.abc import Iterator
from typing import Any

import click
import uvloop

from forebay.cli.command import TraceCommand
from forebay.cli.common.credentials import client_headers
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.survey import print_survey
from forebay.cli.common.tables import counting_bar, print_result, results, table
from forebay.cli.control.client import URL
from forebay.cli.trace.client import NoSystem, TraceOutcome, play
from forebay.processes.notices import complain
from forebay.simulate.outcome import percentiles
from forebay.simulate.reading import open_workload
from forebay.simulate.workload import WorkloadOptions

WORKING = ("aggregated", "prefill", "decode")
SIGNALLED = 128  # a shell adds the number of the signal


def run_trace(command: TraceCommand) -> None:
    with explained():
        headers = client_headers(command.api_key)
    options = WorkloadOptions(speed=command.speed, duration_s=command.duration_s, skip_bad_rows=command.skip_bad_rows)
    urls = [one.rstrip("/") for one in command.url or [URL]]
    concurrency_max = command.max_concurrency
    with explained():
        todo = open_workload(command.workload, options)
        survey = todo.survey()
    outcome = TraceOutcome()
    with counting_bar() as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        task = progress.add_task("answered", total=survey.requests)
        try:
            runner.run(play(todo, urls, headers, concurrency_max, outcome, lambda: progress.advance(task)))
        except NoSystem as error:
            fail(str(error))
    print_survey(survey)
    summary = summarise(outcome, survey.requests, concurrency_max)
    print_result(summary, command.json, lambda: _show(summary))
    for warning in summary["warnings"]:
        complain(f"warning: {warning}")
    if outcome.interrupted:
        raise click.exceptions.Exit(SIGNALLED + outcome.interrupted)
    if summary["failed"] or summary["answered_again"]:
        raise click.exceptions.Exit(1)


def summarise(outcome: TraceOutcome, total: int, concurrency_max: int) -> dict[str, Any]:
    """Return the metrics as `--json` prints them. In a disaggregated fleet only prefill workers count for balance."""
    roles = outcome.roles
    workers = [worker for worker, role in roles.items() if role in WORKING]
    computed = {worker: outcome.computed.get(worker, 0) for worker in sorted({*workers, *outcome.computed})}
    disaggregated = "prefill" in roles.values()
    balanced = [tokens for worker, tokens in computed.items() if not disaggregated or roles.get(worker) == "prefill"]
    mean = statistics.fmean(balanced) if balanced else 0.0
    failed = sum(outcome.failures.counts.values())
    return {
        "requests": len(outcome.e2e_ms),
        "failed": failed,
        "unfinished": outcome.sent - len(outcome.e2e_ms) - failed,
        "unsent": total - outcome.sent,
        "interrupted": bool(outcome.interrupted),
        "failures": outcome.failures.counts,
        "failure_examples": outcome.failures.examples,
        "answered_once": sum(count == 1 for count in outcome.ends.values()),
        "answered_again": sum(count > 1 for count in outcome.ends.values()),
        "prefix_reuse": outcome.cached_tokens / outcome.prompt_tokens if outcome.prompt_tokens else 0.0,
        "load_max_over_mean": max(balanced) / mean if mean else 0.0,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "ttft_ms": percentiles(outcome.ttft_ms),
        "itl_ms": percentiles(outcome.itl_ms),
        "e2e_ms": percentiles(outcome.e2e_ms),
        "pace": outcome.pace.summary(),
        "warnings": [*_silent(outcome), *outcome.pace.warnings(concurrency_max)],
        "workers": {
            worker: {
                "requests": outcome.requests.get(worker, 0) + outcome.prompts.get(worker, 0),
                "computed_tokens": tokens,
            }
            for worker, tokens in computed.items()
        },
        "roles": dict(sorted(roles.items())),
    }


def _silent(outcome: TraceOutcome) -> Iterator[str]:
    for url in outcome.silent:
        yield f"{url} did not respond to GET /metrics after the last request; the list of workers may be incomplete"


def _show(summary: dict[str, Any]) -> None:
    title = f"{summary['requests']} requests completed, {summary['failed']} failed"
    if summary["interrupted"]:
        title += f"; interrupted with {summary['unfinished']} in flight and {summary['unsent']} not sent"
    shown = table(title, ("", "mean", "p50", "p90", "p99"))
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        times = summary[name]
        shown.add_row(name, *(f"{times[key]:.2f}" if times else "-" for key in ("mean", "p50", "p90", "p99")))
    console = results(soft_wrap=True)
    console.print(shown)
    console.print(f"prefix reuse        {summary['prefix_reuse']:.3f} of {summary['prompt_tokens']} prompt tokens")
    console.print(f"load, max over mean {summary['load_max_over_mean']:.3f} of computed prompt tokens")
    for line in _pace_lines(summary["pace"]):
        console.print(line)
    for worker, counts in summary["workers"].items():
        role = summary["roles"].get(worker, "aggregated")
        name = worker if role == "aggregated" else f"{worker} ({role})"
        console.print(f"  {name}: {counts['requests']} requests, {counts['computed_tokens']} tokens computed")
    for kind, count in sorted(summary["failures"].items(), key=lambda one: -one[1]):
        console.print(f"  failed {count}x: {kind}: {summary['failure_examples'][kind]}", markup=False)


def _pace_lines(pace: dict[str, Any]) -> Iterator[str]:
    """Yield the requested and the achieved pace, and by how much requests were sent late."""
    yield f"requested pace      {_rate(pace['requested_per_s'])} in {pace['requested_s']:.1f} s"
    achieved = f"{_rate(pace['achieved_per_s'])} in {pace['achieved_s']:.1f} s"
    yield f"achieved pace       {achieved}, and all responses in {pace['lasted_s']:.1f} s"
    if late := pace["late_ms"]:
        yield f"sent late by        {late['p50']:.0f}/{late['p99']:.0f}/{late['max']:.0f} ms (p50/p99/max)"


def _rate(per_s: float | None) -> str:
    return "all requests at one time" if per_s is None else f"{per_s:.2f} requests/s"
