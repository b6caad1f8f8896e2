"""The fake engine as an adapter."""

from forebay.cli.processes.engines import Adapter

FAKE = Adapter("tests.cli.fake_engine", "FakeEngine", ())
