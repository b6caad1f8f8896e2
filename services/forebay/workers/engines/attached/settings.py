"""Settings of an attached server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.workers.engines.attached.server import ServerInfo
from forebay.workers.kv_events.zmq_feed import KvSource


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedSettings:
    """Address and properties of a server, and the tokenizer of its model.

    Attributes:
        url: base address of the server, for example `http://host:8000`.
        info: what the server publishes about itself.
        encode: returns the tokens of a text, without the special tokens around a prompt.
        decode: returns the text of tokens.
        context_tokens: context length of the model, for servers that do not publish it.
        api_key: key for the server's API; empty for none.
        kv_events: sockets of the server's KV events; None if it publishes none.
        allow_shared_cache: whether the server gets requests with a cache namespace, even if it cannot separate them.
    """

    url: str
    info: ServerInfo
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    context_tokens: int
    api_key: str = ""
    kv_events: KvSource | None = None
    allow_shared_cache: bool = False
