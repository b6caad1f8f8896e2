"""Envoy's documented configuration, which demos and tests use with other ports."""

import re

from tests.harness.envoy import config_of


def test_every_port_of_the_documented_configuration_is_replaced() -> None:
    text = config_of(1, 2, (3, 4))
    assert re.findall(r"port_value: (\d+)", text) == ["1", "3", "4", "2"]
