"""Side channel of vLLM's NIXL connectors: address, port, and the restored environment."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from forebay.events.control import Role
from forebay.workers.engine import EngineError
from forebay.workers.engines import free_ports
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm.core import HOST, PORT, side_channel


def reported(role: Role, **options: Any) -> EngineSettings:
    return EngineSettings(model=Path("/m"), model_name="m", role=role, **options)


@pytest.fixture
def no_channel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (HOST, PORT, "VLLM_HOST_IP"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_side_channel_of_its_own_while_vllm_is_built(no_channel: pytest.MonkeyPatch) -> None:
    with side_channel(reported("decode", dp_size=2)):
        assert os.environ[HOST] == "127.0.0.1"
        first = int(os.environ[PORT])
        # Somebody else comes between.
        with socket.create_server(("127.0.0.1", first)):
            inner = dict(os.environ)
            for name in (HOST, PORT):
                del os.environ[name]
            with side_channel(reported("prefill", dp_size=2)):
                assert not {first, first + 1} & {int(os.environ[PORT]), int(os.environ[PORT]) + 1}
            os.environ.update(inner)
    assert HOST not in os.environ
    assert PORT not in os.environ
    with side_channel(reported("aggregated")):
        assert PORT not in os.environ


def test_missing_free_port_is_reported(no_channel: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        no_channel.setattr(free_ports, "FIRST", port)
        no_channel.setattr(free_ports, "LAST", port + 2)
        with pytest.raises(EngineError, match=PORT), side_channel(reported("decode")):
            pass


def test_configured_side_channel_is_used(no_channel: pytest.MonkeyPatch) -> None:
    no_channel.setenv("VLLM_HOST_IP", "127.0.0.2")
    no_channel.setenv(PORT, "5600")
    with side_channel(reported("prefill")):
        assert (os.environ[HOST], os.environ[PORT]) == ("127.0.0.2", "5600")
    assert os.environ[PORT] == "5600"
    no_channel.setenv(HOST, "127.0.0.3")
    with side_channel(reported("prefill", near_host="127.0.0.5")):
        assert os.environ[HOST] == "127.0.0.3"
    with side_channel(reported("prefill", near_host="127.0.0.5", kv_host="127.0.0.4")):
        assert os.environ[HOST] == "127.0.0.4", "the command line overrides the environment"
    assert os.environ[HOST] == "127.0.0.3", "and is forgotten"


def test_side_channel_listens_at_the_reachable_address(no_channel: pytest.MonkeyPatch) -> None:
    with side_channel(reported("decode", near_host="127.0.0.5")):
        assert os.environ[HOST] == "127.0.0.5"
        socket.create_server(("127.0.0.5", int(os.environ[PORT]))).close()
    assert HOST not in os.environ
