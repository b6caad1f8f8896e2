"""Request passed to the endpoints of a service, and the exception that rejects it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.events.requests import Sampling


class Refused(Exception):
    """Raised by an endpoint to reject a request (with status 400) or a command. The message goes to the caller."""


def _unknown(_: Sequence[int]) -> str:
    raise Refused("this request has no tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One attempt at a request. Operators derive another one with `dataclasses.replace`.

    Attributes:
        token_ids: the prompt, followed by the output so far if a lost worker's response is continued.
        sampling: sampling parameters. The output is cut at `max_tokens` and before `stop_token_ids`.
        sequence_hashes: one per full KV block of the prompt, salted with the next two fields.
        lora_name: adapter to use; empty for none.
        cache_namespace: requests may share cached blocks only within one namespace.
        priority: higher values run sooner.
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
        """Return once the request is cancelled."""
        await self.stopped.wait()
