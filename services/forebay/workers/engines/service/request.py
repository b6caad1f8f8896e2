"""What an endpoint of a service gets: one request, and the one error by which it is refused."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.events.requests import Sampling


class Refused(Exception):
    """An endpoint does not do what it is asked; the text goes to whoever asked. A request's status is 400."""


def _unknown(_: Sequence[int]) -> str:
    raise Refused("this request knows no tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One attempt to answer a prompt; an operator makes another one with `dataclasses.replace`.

    Attributes:
        token_ids: the prompt; of an answer that goes on from a lost worker, also what was said already.
        sampling: how to generate. More than `max_tokens` is cut off, and what ends at `stop_token_ids` ends there.
        sequence_hashes: one for each full KV block of the prompt, already salted by the next two.
        lora_name: the adapter to use; empty for none.
        cache_namespace: caches may be shared only within one.
        priority: higher is sooner.
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
        """Whether nobody waits for the answer any more; a thread that computes it may look here."""
        return self.stopped.is_set()

    async def until_cancelled(self) -> None:
        """Return once the request is cancelled."""
        await self.stopped.wait()
