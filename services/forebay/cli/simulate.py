"""`forebay simulate`: one workload under several policies, in virtual time."""

import json as jsonlib
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from forebay.cli.errors import fail
from forebay.cli.policy_check import require_policy
from forebay.cli.terminal import bar
from forebay.events.control import RouterConfig
from forebay.ingress.errors import Unusable
from forebay.simulate.mooncake import Row, TraceUnusable, rows
from forebay.simulate.outcome import summary
from forebay.simulate.settings import WORKERS_MAX, Settings, policy
from forebay.simulate.simulation import Simulation

POLICIES = ["kv", "round-robin"]
LOOK_EVERY_S = 0.2
SHOWN = ("mean", "p50", "p99")
TIMES = {"ttft_ms": ".0f", "itl_ms": ".1f", "e2e_ms": ".0f"}
FAILURES_PRINTED = 5

Figures = dict[str, Any]
Arrived = Any  # multiprocessing's synchronized array has no public type: requests that arrived, a number a policy
_process: dict[str, Any] = {}  # what a process was started with: an executor hands it over by a global only


def simulate(
    file: Annotated[Path, typer.Argument(help="JSON lines: timestamp, input_length, output_length, hash_ids.")],
    workers: Annotated[int, typer.Option(min=1, max=WORKERS_MAX, help="Mock workers.")] = 8,
    policies: Annotated[
        list[str] | None,
        typer.Option("--policy", help="NAME or NAME:setting=value,…; once for each.", show_default="kv, round-robin"),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a KV block.")] = 64,
    blocks: Annotated[int, typer.Option(min=1, help="KV blocks a worker.")] = 16_384,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences a worker runs at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one engine step.")] = 8_192,
    speed: Annotated[float, typer.Option(min=0.001, max=1e6, help="Divides the times between arrivals.")] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, max=(1 << 63) - 1, help="Decides where nothing else does, and draws.")
    ] = 0,
    duration_s: Annotated[float | None, typer.Option(min=0.001, help="Only the first seconds of the trace.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Run a Mooncake-format trace through the live router and modelled engines, in virtual time.

    Exit 1 unless every request was answered.
    """
    settings = Settings(
        workers=workers,
        block_size=block_size,
        blocks=blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        speed=speed,
        seed=seed,
    )
    try:
        settings.engine()
        routers = {name: policy(name) for name in policies or POLICIES}
        for router in routers.values():
            require_policy(router.mode)
        todo = list(rows(file, duration_s))
    except (TraceUnusable, Unusable, ValueError) as error:
        fail(str(error))
    began_s = time.monotonic()
    figures = _run_all(settings, routers, todo)
    took_s = time.monotonic() - began_s
    result = {
        "policies": figures,
        "digest": sha256("".join(one["digest"] for one in figures.values()).encode()).hexdigest(),
        "settings": {"trace": file.name, **msgspec.to_builtins(settings), "duration_s": duration_s},
    }
    if json:
        typer.echo(jsonlib.dumps(result))
    else:
        _show(result)
    Console(stderr=True).print(f"{len(todo)} requests under {len(routers)} policies in {took_s:.1f} s", highlight=False)
    if any(one["failed"] for one in figures.values()):
        raise typer.Exit(1)


def _run_all(settings: Settings, routers: dict[str, RouterConfig], todo: list[Row]) -> dict[str, Figures]:
    """Every policy in a process of its own, as many at once as there are processors; progress goes to stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with bar(*columns) as progress:
        tasks = [progress.add_task(name, total=len(todo)) for name in routers]
        if len(routers) == 1:
            [(name, router)] = routers.items()
            return {name: _run(settings, router, todo, lambda done: progress.update(tasks[0], completed=done))}
        # Spawned, not forked: a child must not inherit threads or a random hash seed by accident.
        context = multiprocessing.get_context("spawn")
        shared: Arrived = context.Array("q", len(routers))
        processes = min(len(routers), os.cpu_count() or 1)
        with ProcessPoolExecutor(processes, context, _start_process, (settings, todo, shared)) as pool:
            running = [pool.submit(_run_in_process, at, router) for at, router in enumerate(routers.values())]
            left: set[Future[Figures]] = set(running)
            while left:
                left = wait(left, LOOK_EVERY_S).not_done
                for task, done in zip(tasks, shared, strict=True):
                    progress.update(task, completed=done)
            return dict(zip(routers, [one.result() for one in running], strict=True))


def _run(settings: Settings, router: RouterConfig, todo: list[Row], on_arrived: Callable[[int], object]) -> Figures:
    return summary(Simulation(settings, router).run(todo, on_arrived), settings.workers)


def _start_process(settings: Settings, todo: list[Row], shared: Arrived) -> None:
    _process.update(settings=settings, todo=todo, shared=shared)


def _run_in_process(at: int, router: RouterConfig) -> Figures:
    shared = _process["shared"]

    def on_arrived(done: int) -> None:
        shared[at] = done

    return _run(_process["settings"], router, _process["todo"], on_arrived)


def _show(result: dict[str, Any]) -> None:
    settings = result["settings"]
    title = f"{settings['trace']}, {settings['workers']} workers; milliseconds as mean/p50/p99"
    table = Table(title=title, box=SIMPLE, padding=(0, 0, 0, 1))
    for column in ("policy", "failed", "reuse", "max/mean", "TTFT", "ITL", "E2E"):
        table.add_column(column, justify="left" if column == "policy" else "right", overflow="fold")
    for name, one in result["policies"].items():
        times = ["/".join(f"{one[key][of]:{width}}" for of in SHOWN if one[key]) for key, width in TIMES.items()]
        table.add_row(
            name, str(one["failed"]), f"{one['prefix_reuse']:.4f}", f"{one['load_max_over_mean']:.3f}", *times
        )
    Console().print(table)
    for name, one in result["policies"].items():
        for failure in one["failures"][:FAILURES_PRINTED]:
            typer.echo(f"{name}: request {failure['request']} failed: {failure['reason']}")
        if one["failed"] > FAILURES_PRINTED:
            typer.echo(f"{name}: and {one['failed'] - FAILURES_PRINTED} more")
    typer.echo(f"digest {result['digest']}")
