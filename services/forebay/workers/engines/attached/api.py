"""Common form of the requests to a server, and of the responses, over all kinds of servers."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

import msgspec

from forebay.events.requests import Sampling
from forebay.events.tokens import TokenLogprob


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New output of a request.

    Attributes:
        token_ids: new output tokens; None if the server returns text only.
        text: new output as text; only read if `token_ids` is None.
        logprobs: log probability of each token; empty if none were requested.
        finish_reason: why the response has ended; empty if it has not.
        cached_tokens: number of prompt tokens in the server's cache; None if this event does not report it.
    """

    token_ids: list[int] | None = None
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str = ""
    cached_tokens: int | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a server.

    Attributes:
        token_ids: prompt tokens, with the output tokens of earlier attempts at their end.
        text: the prompt as text, for a server that accepts no token ids; empty for the others.
        sampling: sampling parameters for the remaining output.
        lora_name: adapter; empty for the base model.
        cache_salt: salt of the server's cache; empty for none.
        request_id: id of the request at the server; no two requests in flight have the same.
        transfer: vLLM's `kv_transfer_params`; None without KV transfer.
    """

    token_ids: list[int]
    text: str = ""
    sampling: Sampling
    lora_name: str = ""
    cache_salt: str = ""
    request_id: str
    transfer: Mapping[str, Any] | None = None


class Api(Protocol):
    """API of a kind of server.

    Attributes:
        takes_token_ids: whether prompts are sent as token ids.
        returns_token_ids: whether responses have token ids.
        salts_cache: whether requests with different salts share no cached blocks.
    """

    takes_token_ids: bool
    returns_token_ids: bool
    salts_cache: bool

    async def probe(self, prompt: list[int], text: str) -> None:
        """Run a small request, and find out what the server supports.

        Args:
            prompt: prompt tokens.
            text: the same prompt as text.

        Raises:
            EngineError: the server does not serve the request.
        """

    def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        """Run a request, and yield its output until its end. Closing the iterator aborts the request.

        Raises:
            Rejected: the server responded with an error, or does not support a parameter of the request.
            StreamCut: the connection failed, or the response is unreadable.
        """
