"""HTTP client of `forebay profile run`: sends prompts of random tokens, and measures the streamed responses."""

import asyncio
import random
import uuid
from typing import Any

import httpx

from forebay.cli.trace.stream import StreamedResponse

TOKEN_IDS = range(16, 240)  # in the vocabulary of every model, and above the special tokens of most
# Client errors that other requests would get, too.
NOT_ABOUT_REQUEST = frozenset({httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.TOO_MANY_REQUESTS})


class PointImpossible(Exception):
    """This point cannot be measured, but others can. The message is the reason."""


class MeasurementFailed(Exception):
    """The system does not serve requests. The message is the reason."""


class ProfiledWorker:
    """The worker that is measured, behind an OpenAI-compatible API."""

    def __init__(self, client: httpx.AsyncClient, url: str, model: str, worker: str, timeout_s: float) -> None:
        """Create a worker.

        Args:
            worker: id of the worker; empty for a system with one worker.
            timeout_s: maximum seconds for a response.
        """
        self._client = client
        self._url = url
        # Prompts of the same point are the same in each run. The salt keeps them apart in the worker's cache.
        self._fields: dict[str, Any] = {"model": model, "cache_salt": uuid.uuid4().hex}
        if worker:
            self._fields["nvext"] = {"backend_instance_id": worker}
        self._timeout_s = timeout_s

    async def measure(self, prompt: list[int], output_tokens: int) -> StreamedResponse:
        """Send a prompt and measure the response.

        Raises:
            PointImpossible: the system rejects the request, or does not respond in time.
            MeasurementFailed: the system does not serve requests.
        """
        response = StreamedResponse(output_tokens)
        try:
            async with asyncio.timeout(self._timeout_s):
                failure = await response.follow(self._client, self._url, {**self._fields, "prompt": prompt}, {})
        except TimeoutError:
            raise PointImpossible(f"no complete response within {self._timeout_s:g} s") from None
        if failure is None:
            return response
        if httpx.codes.is_client_error(response.status) and response.status not in NOT_ABOUT_REQUEST:
            raise PointImpossible(f"{failure.kind}: {failure.text}")  # for example, the prompt exceeds the context
        raise MeasurementFailed(f"{failure.kind}: {failure.text}")


def random_prompts(tokens: int, count: int, seed: str) -> list[list[int]]:
    """Return prompts of random token ids, the same for the same seed. No two of them share a prefix of a KV block."""
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    return [rng.choices(TOKEN_IDS, k=tokens) for _ in range(count)]
