"""The fake engine as an adapter."""

from forebay.cli.processes.engine_options import Adapter

FAKE = Adapter("tests.cli.fake_engine", "FakeEngine", ())
