"""NIXL agents of workers: how they are made and called, and what is raised where one cannot give what it holds."""

import logging
import os
from typing import Any

from forebay.workers.engine import EngineError

LOCAL = "NIXL_INIT_AGENT"  # NIXL's name for whoever calls it


class TransferError(Exception):
    """What lies in another worker's memory cannot be offered or fetched. The text says why, fit for the log.

    Attributes:
        reason: one word of a few, which failures are counted by: see `forebay.workers.kv_transfer.api.REASONS`.
    """

    def __init__(self, text: str, reason: str = "failed") -> None:
        super().__init__(text)
        self.reason = reason


def agent_name(worker_id: str, worker_epoch: int) -> str:
    """What the agent of one life of a worker is called."""
    return f"{worker_id}@{worker_epoch}"


def load_nixl(what: str = "embeddings travel") -> Any:
    """The NIXL bindings. Raises EngineError where they are not installed, saying `what` goes by NIXL."""
    try:
        import nixl_cu12  # noqa: PLC0415 - half a second, and an extra
        import numpy  # noqa: F401, PLC0415 - likewise
    except ImportError as error:
        raise EngineError(
            f"{what} by NIXL, which cannot be imported ({error}): pip install numpy && pip install --no-deps nixl-cu12"
        ) from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of every agent that starts
    return nixl_cu12


def open_agent(name: str, interface: str = "") -> Any:
    """An agent with the backend UCX and no progress thread, which would spin: whoever has it must poll.

    With `interface` it goes by that one's network alone; else UCX chooses, or UCX_NET_DEVICES says.
    """
    nixl = load_nixl()
    # Else UCX waits for a host that is switched off, minutes long, and whoever polls does nothing else meanwhile.
    settings = [] if "UCX_TCP_CONN_NB" in os.environ else ["TCP_CONN_NB=y"]
    if interface:
        settings.append(f"NET_DEVICES={interface}")
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"engine_config": ",".join(settings)})
    return agent


def said_name(name: str | bytes) -> str:
    """The name that `add_remote_agent` found in metadata: bytes in some releases."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name
