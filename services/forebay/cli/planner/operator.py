"""`forebay planner set`: orders of an operator, and their effect."""

import asyncio

import click

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.operator_name import operator_name
from forebay.cli.common.terminal import printable
from forebay.cli.planner.command import AUTO, SIZE_MAX, PlannerSetCommand
from forebay.core.scaling.state import PoolKey
from forebay.planner.orders import Order, execute_order, pause_order, scaling_on_kafka, size_order
from forebay.processes.notices import complain

NO_EFFECT = 1


def run_set(options: PlannerSetCommand) -> None:
    pool, size = options.pool, options.size
    if bool(pool) == (options.pause is not None) or bool(pool) != bool(size):
        fail("expected one of: GROUP/POOL and its size, --pause, --resume")
    is_number = size.isdecimal() and size.isascii() and len(size) <= len(str(SIZE_MAX))
    if size not in ("", AUTO) and not (is_number and int(size) <= SIZE_MAX):
        fail(f"N: expected {AUTO} or a number from 0 to {SIZE_MAX}, got {size}")
    count = int(size) if size not in ("", AUTO) else None
    timeout_s = options.timeout_s if options.wait else None
    name = operator_name(options.operator)

    def on_step(kind: str, text: str) -> None:
        if kind == "problem":
            complain(text)
        else:
            click.echo(printable(f"{kind:<10} {text}"))

    def make(pools: list[PoolKey]) -> Order:
        return size_order(pools, pool, count, name) if pool else pause_order(name, paused=bool(options.pause))

    async def run() -> bool:
        async with scaling_on_kafka(options.kafka.settings()) as log:
            return await execute_order(log, make, timeout_s, on_step)

    with explained():
        is_effective = asyncio.run(run())
    if not is_effective:
        raise click.exceptions.Exit(NO_EFFECT)
