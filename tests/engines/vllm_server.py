"""`vllm serve` as a process of its own, which forebay does not start but attaches."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.kafka.kafka import HOST
from tests.engines.serving import BLOCK, BLOCKS, CONTEXT_TOKENS, LEASE_TTL_S, LORA_RANK_MAX, Ports
from tests.harness.local import free_ports

PORTS = 4  # of each server: its API, its KV events, their replay, NIXL's side channel
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


@dataclass(frozen=True, slots=True)
class VllmServer:
    """Addresses of a server.

    Attributes:
        first_port: first of its `PORTS` ports.
    """

    model_names: tuple[str, ...]
    first_port: int

    @property
    def url(self) -> str:
        """Base address of the API."""
        return f"http://{HOST}:{self.first_port}"

    @property
    def ports(self) -> Ports:
        """Ports of its metrics, which the API serves, and of its replay socket."""
        return Ports(replay=self.first_port + 2, metrics=self.first_port)

    def command(self, model: Path, transfer: Mapping[str, Any], *options: str) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.first_port + 1}",
            "replay_endpoint": f"tcp://*:{self.first_port + 2}",
            "topic": "kv-events",
        }
        nixl = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.first_port + 3)}
        values: dict[str, Any] = {
            "model": model,
            "host": HOST,
            "port": self.first_port,
            "dtype": "float32",
            "max-model-len": CONTEXT_TOKENS,
            "block-size": BLOCK,
            "max-num-seqs": 8,
            "num-gpu-blocks-override": BLOCKS,
            "kv-events-config": json.dumps(events),
            "kv-transfer-config": json.dumps(transfer),
        }
        return [
            *("env", *(f"{name}={value}" for name, value in (ENVIRONMENT | nixl).items())),
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"),
            *(text for name, value in values.items() for text in (f"--{name}", str(value))),
            *("--served-model-name", *self.model_names),
            *options,
        ]

    def upstream(self) -> list[str]:
        """Return the options of `forebay worker` that attach the server."""
        events = ",".join(f"tcp://{HOST}:{self.first_port + at}" for at in (1, 2))
        return ["--upstream", self.url, "--upstream-kv-events", events, "--lease-ttl-s", str(LEASE_TTL_S)]


def lora_options() -> list[str]:
    """Return the options of a server that loads adapters."""
    return ["--enable-lora", "--max-lora-rank", str(LORA_RANK_MAX)]


def vllm_server(*model_names: str) -> VllmServer:
    """Return a server of these names on free ports."""
    return VllmServer(model_names, free_ports(PORTS))
