"""Envoy's documented configuration, which demos and tests use with other ports."""

import re

from infra.kafka.kafka import ROOT
from tests.harness.envoy import CONFIG, config_of


def test_every_port_of_the_documented_configuration_is_replaced() -> None:
    text = config_of(1, 2, (3, 4))
    assert re.findall(r"port_value: (\d+)", text) == ["1", "3", "4", "2"]


def test_the_settings_on_the_page_are_those_of_the_configuration() -> None:
    page = (ROOT / "docs/gateway.md").read_text()
    settings = re.findall(r"^\| `(\w+: [^`]+)` \|", page, re.MULTILINE)
    assert len(settings) == 3
    assert not [one for one in settings if one not in CONFIG.read_text()]
