"""`forebay planner pause`, `resume` and `set-size`: orders of an operator, and their effect."""

import asyncio
from collections.abc import Callable

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
from forebay.transport.kafka.settings import KafkaSettings

NO_EFFECT = 1


def run_pause(*, kafka: KafkaOptions, operator: str, timeout_s: float, wait: bool) -> None:
    """Run `forebay planner pause`. command.py documents its options."""
    order = pause_order(operator_name(operator), paused=True)
    _execute(kafka, lambda _: order, timeout_s if wait else None)


def run_resume(*, kafka: KafkaOptions, operator: str, timeout_s: float, wait: bool) -> None:
    """Run `forebay planner resume`. command.py documents its options."""
    order = pause_order(operator_name(operator), paused=False)
    _execute(kafka, lambda _: order, timeout_s if wait else None)


def run_set_size(
    *,
    pool: str,
    kafka: KafkaOptions,
    size: int | None,
    release: bool,
    operator: str,
    timeout_s: float,
    wait: bool,
) -> None:
    """Run `forebay planner set-size`. command.py documents its options."""
    if (size is None) != release:
        fail("expected either the number of workers N or --release")
    name = operator_name(operator)
    _execute(kafka, lambda pools: size_order(pools, pool, size, name), timeout_s if wait else None)


def _execute(kafka: KafkaOptions, make: Callable[[list[PoolKey]], Order], timeout_s: float | None) -> None:
    """Record an order, and wait for its effect unless `timeout_s` is None."""
    with explained():
        is_effective = asyncio.run(_run(kafka.settings(), make, timeout_s))
    if not is_effective:
        raise typer.Exit(NO_EFFECT)


async def _run(settings: KafkaSettings, make: Callable[[list[PoolKey]], Order], timeout_s: float | None) -> bool:
    """Record an order, and return whether its effect was seen."""
    report = OrderReport(lambda kind, text: typer.echo(printable(f"{kind:<10} {text}")), complain)
    try:
        async with scaling_on_kafka(settings) as log:
            return await execute_order(log, make, timeout_s, report)
    except OrderInvalid as error:
        fail(str(error))
