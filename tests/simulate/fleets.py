"""Builders of turns and fleets for tests of simulated requests."""

from collections.abc import Iterator
from typing import Any

from forebay.simulate.settings import LifeCycleSettings, PoolRole, PoolSettings, Settings, WorkerGroup, engine_config
from forebay.simulate.workload import Survey, Turn


class Turns:
    name = "turns"
    block_tokens = 64

    def __init__(self, *turns: Turn) -> None:
        self._turns = turns

    def survey(self) -> Survey:
        return Survey(requests=len(self._turns))

    def turns(self) -> Iterator[Turn]:
        yield from self._turns


def turn(number: int, prompt: int = 64, output: int = 1, **changes: Any) -> Turn:
    return Turn(number=number, prompt_tokens=prompt, output_tokens=output, **changes)


def fleet(
    workers: int = 2, life: LifeCycleSettings | None = None, sizes: dict[str, int] | None = None, **changes: Any
) -> Settings:
    group = WorkerGroup(count=workers, engine=engine_config(**(sizes or {})))
    return Settings(pools=(PoolSettings(groups=(group,)),), life=life or LifeCycleSettings(), **changes)


def split(
    prefill: int,
    decode: int,
    life: LifeCycleSettings | None = None,
    sizes: dict[str, int] | None = None,
    **changes: Any,
) -> Settings:
    """Return a prefill pool (if `prefill` > 0) and a decode pool of one model. Prefill workers come first by name."""
    engine = engine_config(**(sizes or {}))
    roles: tuple[tuple[PoolRole, int], ...] = (("prefill", prefill), ("decode", decode))
    pools = [
        PoolSettings(
            name="default" if role == "decode" else role, role=role, groups=(WorkerGroup(count=count, engine=engine),)
        )
        for role, count in roles
        if count
    ]
    return Settings(pools=tuple(pools), life=life or LifeCycleSettings(), **changes)
