"""`forebay planner set`: orders of an operator, and their effect."""

import asyncio

import typer

from forebay.cli.common.cluster_options import KafkaOptions
from forebay.cli.common.errors import complain, explained, fail
from forebay.cli.common.operator_name import operator_name
from forebay.cli.common.terminal import printable
from forebay.core.scaling.state import PoolKey
from forebay.planner.orders import (
    Order,
    OrderInvalid,
    OrderReport,
    execute_order,
    pause_order,
    scaling_on_kafka,
    size_order,
)

NO_EFFECT = 1


def execute(
    kafka: KafkaOptions, operator: str, *, pool: str, size: int | None, is_pause: bool, timeout_s: float | None
) -> None:
    """Record an order about a pool, or about the planner if `pool` is empty. Wait for its effect.

    Args:
        size: Number of workers; None to release the pool.
        timeout_s: Seconds to wait for the effect; None to return once the order is recorded.

    Raises:
        typer.Exit: The order is invalid, or its effect was not seen.
    """
    name = operator_name(operator)
    report = OrderReport(lambda kind, text: typer.echo(printable(f"{kind:<10} {text}")), complain)

    def make(pools: list[PoolKey]) -> Order:
        return size_order(pools, pool, size, name) if pool else pause_order(name, paused=is_pause)

    async def run() -> bool:
        try:
            async with scaling_on_kafka(kafka.settings()) as log:
                return await execute_order(log, make, timeout_s, report)
        except OrderInvalid as error:
            fail(str(error))

    with explained():
        is_effective = asyncio.run(run())
    if not is_effective:
        raise typer.Exit(NO_EFFECT)
