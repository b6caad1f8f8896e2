"""Creation of NIXL agents, and the exception for failed transfers."""

import logging
import os
from typing import Any

from forebay.workers.engine import EngineError

LOCAL = "NIXL_INIT_AGENT"  # NIXL's name for the calling agent


class TransferError(Exception):
    """Failed offer or fetch of another worker's memory. The message is for the log.

    Attributes:
        reason: one of `forebay.workers.kv_transfer.api.REASONS`, for counters.
    """

    def __init__(self, text: str, reason: str = "failed") -> None:
        super().__init__(text)
        self.reason = reason


def agent_name(worker_id: str, worker_epoch: int) -> str:
    """Return the name of the agent of a worker epoch."""
    return f"{worker_id}@{worker_epoch}"


def load_nixl(what: str = "embedding transfers") -> Any:
    """Return the NIXL bindings. Raises EngineError for `what`, the feature that needs them, if they are missing."""
    try:
        import nixl_cu12  # noqa: PLC0415 - half a second, and an extra
        import numpy  # noqa: F401, PLC0415 - likewise
    except ImportError as error:
        raise EngineError(
            f"cannot import NIXL for {what} ({error}): pip install numpy && pip install --no-deps nixl-cu12"
        ) from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it logs every agent that starts
    return nixl_cu12


def open_agent(name: str, interface: str = "") -> Any:
    """Return an agent with the UCX backend and no progress thread, which would spin. The caller must poll it.

    UCX uses only the network of `interface`, if given; otherwise it chooses, or UCX_NET_DEVICES determines the network.
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
    """Return the name that `add_remote_agent` found in metadata; some releases return bytes."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name
