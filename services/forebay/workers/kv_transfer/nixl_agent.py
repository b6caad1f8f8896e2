"""Create NIXL agents, and define the exception for failed transfers."""

import logging
import os
from typing import Any

from forebay import runtime
from forebay.workers.engine import PackageMissing

AGENT_BYTES = 8
LOCAL = "NIXL_INIT_AGENT"  # NIXL's name for the calling agent


class TransferError(Exception):
    """Blocks cannot be offered or fetched. `reason`, for counters, is one of `api.REASONS`."""

    def __init__(self, text: str, reason: str = "failed") -> None:
        super().__init__(text)
        self.reason = reason


def agent_name(worker_id: str) -> str:
    """Return a name for a NIXL agent of a worker that no other agent has: `worker@` and random digits."""
    return f"{worker_id}@{runtime.random_int(AGENT_BYTES):x}"


def load_nixl(what: str = "embedding transfers") -> Any:
    """Return the Python bindings of NIXL. Raises PackageMissing, for the feature `what`, without NIXL."""
    try:
        import nixl_cu12  # noqa: PLC0415 - half a second, and an extra
    except ImportError as error:
        raise PackageMissing(f"cannot import NIXL for {what} ({error}): pip install --no-deps nixl-cu12") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # otherwise NIXL logs every agent that starts
    return nixl_cu12


def open_agent(name: str, interface: str = "") -> Any:
    """Return a NIXL agent with the UCX backend. It has no progress thread, because that would poll without a pause.

    So the caller must poll the agent. If `interface` is empty, UCX selects one, or uses those in `UCX_NET_DEVICES`.
    """
    nixl = load_nixl()
    # By default UCX waits minutes for an unreachable host, and blocks the polling thread meanwhile.
    settings = [] if "UCX_TCP_CONN_NB" in os.environ else ["TCP_CONN_NB=y"]
    if interface:
        settings.append(f"NET_DEVICES={interface}")
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"engine_config": ",".join(settings)})
    return agent


def remote_name(name: str | bytes) -> str:
    """Return a result of NIXL's `add_remote_agent` as text. It is the name in the metadata, in some releases bytes."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name
