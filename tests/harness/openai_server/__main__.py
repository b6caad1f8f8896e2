"""Run a stand-in as a process, until it is interrupted or terminated."""

import argparse
import asyncio
import logging
import signal
from typing import Any, get_args

from tests.harness.openai_server.server import OpenAiServer
from tests.harness.openai_server.settings import Flavor, ServerSettings

HELP = {
    "model": "model directory",
    "model_name": "name of the model in the API",
    "flavor": "server to imitate",
    "block_size": "tokens per KV block",
    "kv_blocks": "KV blocks",
    "max_num_seqs": "maximum number of running requests",
    "max_model_len": "maximum tokens of a prompt and its response",
    "token_s": "seconds per output token",
    "kv_events_port": "port of the PUB socket of KV events; replays are on the next",
    "kv_transfer": "compute prompts for other servers, and fetch KV from them",
    "enable_lora": "let clients load adapters",
    "prompt_tokens_details": "report cached tokens in `usage`",
}


def parse() -> tuple[ServerSettings, int]:
    """Return the settings on the command line, and the port of the server."""
    parser = argparse.ArgumentParser("python -m tests.harness.openai_server", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="port of the server")
    for name, text in HELP.items():
        default = getattr(ServerSettings(), name)
        kind: dict[str, Any] = {"type": type(default)}
        if isinstance(default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        elif name == "flavor":
            kind = {"choices": get_args(Flavor)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=text, **kind)
    given = vars(parser.parse_args())
    port = given.pop("port")
    return ServerSettings(**given, kv_events=given["kv_events_port"] > 0), port


async def serve(settings: ServerSettings, port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with OpenAiServer(settings, port=port) as server:
        print(f"serving {settings.model_name} as {settings.flavor} at {server.url}", flush=True)
        await ended.wait()


if __name__ == "__main__":
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it reports each stream that a fault cuts
    asyncio.run(serve(*parse()))
