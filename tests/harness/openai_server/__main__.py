"""Run a stand-in as a process, until it is interrupted or terminated."""

import argparse
import asyncio
import logging
import signal
from pathlib import Path
from typing import get_args

from tests.harness.openai_server.server import OpenAiServer
from tests.harness.openai_server.settings import Flavor, ServerSettings


def parse() -> tuple[ServerSettings, int]:
    """Return the settings on the command line, and the port of the server."""
    defaults = ServerSettings()
    parser = argparse.ArgumentParser("python -m tests.harness.openai_server", description=__doc__)
    add = parser.add_argument
    add("--port", type=int, required=True, help="port of the server")
    add("--model", type=Path, default=defaults.model, help="model directory")
    add("--model-name", default=defaults.model_name, help="name of the model in the API")
    add("--flavor", choices=get_args(Flavor), default=defaults.flavor, help="server to imitate")
    add("--block-size", type=int, default=defaults.block_size, help="tokens per KV block")
    add("--kv-blocks", type=int, default=defaults.kv_blocks, help="KV blocks")
    add("--max-num-seqs", type=int, default=defaults.max_num_seqs, help="maximum number of running requests")
    add("--max-model-len", type=int, default=0, help="maximum tokens of a prompt and its response")
    add("--token-s", type=float, default=0.0, help="seconds per output token")
    add("--prefill-us-per-token", type=float, default=0.0, help="microseconds per prompt token that is not cached")
    add("--chunk-tokens", type=int, default=1, help="maximum output tokens per chunk of a stream")
    add("--kv-events-port", type=int, default=0, help="port of the PUB socket of KV events; replays are on the next")
    add("--kv-events-topic", default="", help="topic of the KV events")
    add("--kv-transfer", action="store_true", help="compute prompts for other servers, and fetch KV from them")
    add("--kv-lease-s", type=float, default=defaults.kv_lease_s, help="seconds for which KV is kept for others")
    add("--enable-lora", action="store_true", help="let clients load adapters")
    details = argparse.BooleanOptionalAction
    add("--enable-prompt-tokens-details", action=details, default=True, help="report cached tokens in `usage`")
    add("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs", help="order of waiting requests")
    given = parser.parse_args()
    return ServerSettings(
        model=given.model,
        model_name=given.model_name,
        flavor=given.flavor,
        block_size=given.block_size,
        kv_blocks=given.kv_blocks,
        max_num_seqs=given.max_num_seqs,
        max_model_len=given.max_model_len,
        token_s=given.token_s,
        prefill_us_per_token=given.prefill_us_per_token,
        chunk_tokens=given.chunk_tokens,
        kv_events=given.kv_events_port > 0,
        kv_events_port=given.kv_events_port,
        kv_events_topic=given.kv_events_topic,
        kv_transfer=given.kv_transfer,
        kv_lease_s=given.kv_lease_s,
        enable_lora=given.enable_lora,
        prompt_tokens_details=given.enable_prompt_tokens_details,
        priorities=given.scheduling_policy == "priority",
    ), given.port


async def serve(settings: ServerSettings, port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with OpenAiServer(settings, port=port) as server:
        print(f"serving {settings.model_name} as {settings.flavor} at {server.url}", flush=True)
        await ended.wait()


def main() -> None:
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it reports each stream that a fault cuts
    asyncio.run(serve(*parse()))


if __name__ == "__main__":
    main()
