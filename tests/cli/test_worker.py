"""A worker that is not admitted warns once."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forebay.cli.processes.attached import CHECKS, warn_if_not_admitted
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.metrics import Probes
from forebay.workers.runtime.worker import Worker
from tests.system import until


class StateSequence:
    """Life-cycle states returned one per query. The last state repeats."""

    def __init__(self, *states: State) -> None:
        self.states = list(states)
        self.looks = 0

    @property
    def state(self) -> State:
        self.looks += 1
        return self.states[min(self.looks, len(self.states)) - 1]


def watched(*states: State) -> tuple[Probes, StateSequence]:
    probes, life = Probes(), StateSequence(*states)
    probes.worker = cast("Worker", cast(Any, SimpleNamespace(life=life)))
    return probes, life


@pytest.mark.asyncio
async def test_a_worker_that_is_not_admitted_warns_once(capfd: pytest.CaptureFixture[str]) -> None:
    warning = "forebay: worker w is not admitted and keeps trying"
    await warn_if_not_admitted(Probes(), "w", check_s=0.0)  # no router has placed its model
    starts, joins = [State.CREATED] * 9, [State.REGISTERED] * CHECKS
    probes, life = watched(*starts, *joins[1:], State.RUNNING, State.HEALTHY, *joins)
    await warn_if_not_admitted(probes, "w", check_s=0.0)
    assert life.looks == len(life.states), "not for an engine that starts, and not for one that waited a moment"
    lines = capfd.readouterr().err.splitlines()
    assert [line.startswith(warning) for line in lines] == [True, True]


@pytest.mark.asyncio
async def test_an_admitted_worker_does_not_warn(capfd: pytest.CaptureFixture[str]) -> None:
    probes, life = watched(State.REGISTERED, State.HEALTHY)
    watching = asyncio.create_task(warn_if_not_admitted(probes, "w", check_s=0.0))
    await until(lambda: life.looks > 10 * CHECKS)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert capfd.readouterr() == ("", "")
