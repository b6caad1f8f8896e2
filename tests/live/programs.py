"""Programs with different versions of the decision rules, for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from forebay.core.world import CORE_VERSION
from forebay.live.owner import owner, snapshots
from forebay.live.owner.owner import Owner
from forebay.live.router import standby
from forebay.transport.history import reader
from forebay.transport.history import snapshots as recorded_snapshots
from tests.system import System, until

OTHER = CORE_VERSION + 1
OTHER_RELEASE = "0.9.9"
MODULES = (owner, snapshots, standby, reader, recorded_snapshots)
PREFIX = list(range(12))


class Program:
    """A program with a version of the decision rules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
        self._monkeypatch = monkeypatch
        self._version = version

    async def serve(self, system: System, *names: str, seals: bool) -> None:
        """Serve requests with an owner of this program, which stops as planned if `seals`, and otherwise dies."""
        async with self.owning(system, seals=seals) as serving:
            for name in names:
                await system.serve(name, PREFIX)
            await until(lambda: not len(serving.world.requests))

    @asynccontextmanager
    async def owning(self, system: System, *, seals: bool) -> AsyncIterator[Owner]:
        """Run an owner of this program, which stops as planned if `seals`, and otherwise dies."""
        with self._monkeypatch.context() as patch:
            for module in MODULES:
                patch.setattr(module, "CORE_VERSION", self._version)
            if self._version != CORE_VERSION:
                patch.setattr(owner, "own_release", lambda: OTHER_RELEASE)
            async with system.owned(fleet=1, dies=not seals) as serving:
                yield serving
