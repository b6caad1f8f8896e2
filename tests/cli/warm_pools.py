"""Process pools that fork from a server with the simulator imported, which saves a second per process."""

import multiprocessing
from types import SimpleNamespace

import pytest

from forebay.cli.simulate import simulations

PRELOADED = ["forebay.cli.simulate.command", "forebay.cli.simulate.against", "forebay.cli.simulate.sweep"]


def fork_from_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of simulations from a server that has imported the simulator."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    warm = SimpleNamespace(get_context=lambda _: context, active_children=multiprocessing.active_children)
    monkeypatch.setattr(simulations, "multiprocessing", warm)
