"""The request that the endpoints of a service receive, and the exception with which they reject it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.events.requests import Sampling


class Refused(Exception):
    """An endpoint of a service rejects a request or a command.

    The client gets the message: with status 400 for a request, as the outcome of the worker for a command.
    """


def _unknown(_: Sequence[int]) -> str:
    raise Refused("this request has no tokenizer: there is no tokenizer.json in the model directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One attempt at a request, as an endpoint of a service receives it.

    The operators of a pipeline change a request with `dataclasses.replace`.

    Attributes:
        token_ids: token ids of the prompt. If this attempt continues the response of a lost worker, the output so far
            follows.
        sampling: sampling parameters. The engine cuts the output at `max_tokens` and before `stop_token_ids`.
        sequence_hashes: hash of each full KV block of the prompt. It also depends on `lora_name` and `cache_namespace`.
        lora_name: name of the LoRA adapter to use; empty for the base model.
        cache_namespace: requests may share cached blocks only if they have the same namespace.
        priority: priority of the request; requests with higher values should run sooner.
        detokenize: returns the text of token ids. Raises Refused for a service without a tokenizer.
        stopped: set when the request is cancelled.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    sequence_hashes: tuple[int, ...] = ()
    lora_name: str = ""
    cache_namespace: str = ""
    priority: int = 0
    detokenize: Callable[[Sequence[int]], str] = field(default=_unknown, repr=False, compare=False)
    stopped: asyncio.Event = field(default_factory=asyncio.Event, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The prompt as text. Raises Refused for a service without a tokenizer."""
        return self.detokenize(self.token_ids)

    @property
    def cancelled(self) -> bool:
        """Whether the request was cancelled. May be read on any thread."""
        return self.stopped.is_set()

    async def until_cancelled(self) -> None:
        await self.stopped.wait()
