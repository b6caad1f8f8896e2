"""Attached engines in tests, with the tokenizer of the default model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.workers.engines.attached.engine import AttachedEngine, AttachedSettings
from forebay.workers.engines.attached.server import ServerInfo, UpstreamServer
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.kv_events.zmq_feed import KvSource
from tests.engines.driven import Driven, driven
from tests.harness.openai_server import OpenAiServer
from tests.workers.engine_setup import SPEC
from tests.workers.odd_server import OddServer

MODEL = Model(DEFAULT_MODEL)
decode = partial(MODEL.tokenizer.decode, skip_special_tokens=False)


async def described(url: str, name: str = "") -> ServerInfo:
    server = UpstreamServer(url)
    try:
        return await server.describe(name)
    finally:
        await server.close()


async def attached_to(
    server: OpenAiServer | OddServer, settings: EngineSettings | None = None, **options: Any
) -> AttachedEngine:
    source = None
    if isinstance(server, OpenAiServer) and server.events is not None:
        source = KvSource(server.kv_events, server.kv_replay)
    attached = AttachedSettings(
        url=server.url,
        info=await described(server.url),
        encode=MODEL.encode,
        decode=decode,
        context_tokens=MODEL.context_tokens,
        kv_events=source,
        **options,
    )
    return AttachedEngine(settings or EngineSettings(model=DEFAULT_MODEL, model_name="m"), attached)


@asynccontextmanager
async def attached(
    server: OpenAiServer | OddServer, settings: EngineSettings | None = None, **options: Any
) -> AsyncIterator[Driven]:
    async with driven(await attached_to(server, settings, **options), SPEC) as one:
        yield one
