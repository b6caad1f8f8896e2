"""Fixtures of browser tests."""

from tests.cli.conftest import browser

__all__ = ["browser"]
