"""`forebay serve`: the worker processes of one service, each with its share of the machine.

A process that ends is not restarted, because that is the task of the machine's supervisor. The other processes
continue.
"""

import asyncio
import os
import re
import shutil
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import click

from forebay.cli.common.errors import explained
from forebay.cli.processes.command import ServeCommand
from forebay.processes.names import process_name
from forebay.processes.notices import complain
from forebay.runtime.errors import ConfigError
from forebay.workers.service import Service, load_service

GPU = re.compile(r"nvidia\d+")
SIGNALS = (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)  # sent in this order: drain, stop at once, kill
SIGNALLED = 128  # plus the number of the signal, as in a shell


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker process gets: its worker id, options and additional environment variables."""

    worker_id: str
    options: tuple[str, ...]
    environment: dict[str, str]


def run_serve(options: ServeCommand) -> None:
    with explained():
        made = load_service(options.service)
        found = shares(
            made,
            options.workers or made.workers,
            options.worker_id_prefix or process_name(),
            options.metrics_port,
            devices(os.environ, Path("/dev")),
        )
    file = click.get_current_context().params["config"]
    of_each = ["--engine", options.service, *(() if file is None else ("--config", str(file)))]
    raise click.exceptions.Exit(asyncio.run(run_shares(found, [*of_each, *(options.options or ())])))


def devices(environment: Mapping[str, str], folder: Path) -> list[str]:
    """Return the names of the GPUs that this process may use, in the syntax of CUDA_VISIBLE_DEVICES."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(number) for number in range(sum(1 for path in folder.glob("nvidia*") if GPU.fullmatch(path.name)))]


def shares(
    service: Service, workers: int, worker_id: str, metrics_port: int | None, gpus: Sequence[str]
) -> list[Share]:
    """Divide GPUs and ports among the worker processes. Raises ConfigError if there are too few of them."""
    each = service.resources.gpu
    if workers * each > len(gpus):
        raise ConfigError(
            f"{service.name}: {workers} workers with {each} GPUs each need {workers * each}, and {len(gpus)} are "
            "visible; start fewer workers, or list more GPUs in CUDA_VISIBLE_DEVICES"
        )
    if metrics_port is not None and metrics_port + workers > 65_536:
        raise ConfigError(
            f"--metrics-port {metrics_port}: {workers} workers need ports above the maximum of 65535; choose a lower "
            "port"
        )
    found = []
    for number in range(workers):
        environment = {}
        if service.resources.cpu is not None:
            environment["OMP_NUM_THREADS"] = str(ceil(service.resources.cpu))
        if each:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[number * each : (number + 1) * each])
        options = ["--id", f"{worker_id}-{number}"]
        if metrics_port is not None:
            options += ["--metrics-port", str(metrics_port + number)]
        found.append(Share(f"{worker_id}-{number}", tuple(options), environment))
    return found


async def run_shares(shares: Sequence[Share], options: Sequence[str]) -> int:
    """Run all processes until the last one ends, and return the highest exit code."""
    running: dict[str, Process] = {}
    signals = 0

    def notify(process: Process) -> None:
        if process.returncode is None:
            # Not `send_signal`: it polls the process, which would take the exit code from the task that waits for it.
            with suppress(ProcessLookupError):
                os.kill(process.pid, SIGNALS[min(signals, len(SIGNALS)) - 1])

    def stop() -> None:
        nonlocal signals
        signals += 1
        for process in running.values():
            notify(process)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        for share in shares:
            if not signals:
                process = running[share.worker_id] = await _start(share, options)
                if signals:  # a signal arrived while the process was starting
                    notify(process)
        ends = [_ended(name, process, lambda: signals > 0) for name, process in running.items()]
        return max(await asyncio.gather(*ends), default=0)
    finally:
        for process in running.values():
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _start(share: Share, options: Sequence[str]) -> Process:
    # A separate session, so that Ctrl-C reaches the worker only through this process. The worker ends if this process
    # is killed.
    tie = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    return await asyncio.create_subprocess_exec(
        *(*tie, sys.executable, "-m", "forebay.cli", "worker", *share.options, *options),
        env={**os.environ, **share.environment},
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )


async def _ended(worker_id: str, process: Process, stopping: Callable[[], bool]) -> int:
    code = await process.wait()
    if code == -signal.SIGTERM and stopping():
        return 0  # outside of `drain` the worker has nothing to finish, so the signal ends it
    if code:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        complain(f"worker {worker_id} {how}")
    return SIGNALLED - code if code < 0 else code
