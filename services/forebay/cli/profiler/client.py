"""HTTP client of `forebay profile run`: sends prompts of random tokens, and measures the streamed responses."""

import asyncio
import random
import time
import uuid
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from forebay.cli.common.failures import event_failure, status_failure
from forebay.cli.trace.failures import transport_failure

TOKEN_IDS = range(16, 240)  # in the vocabulary of every model, and above the special tokens of most
# Client errors that other requests would get, too.
NOT_ABOUT_REQUEST = frozenset({httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.TOO_MANY_REQUESTS})


class PointImpossible(Exception):
    """This point cannot be measured, but others can. The message is the reason."""


class MeasurementFailed(Exception):
    """The system does not serve requests. The message is the reason."""


@dataclass(frozen=True, slots=True)
class ResponseTimes:
    """Times of one response.

    Attributes:
        ttft_s: seconds until the first token.
        itl_s: mean seconds between two tokens; 0 for a response of one token.
        prompt_tokens: prompt tokens that the system counted.
        cached_tokens: the part of `prompt_tokens` that was found in a cache.
    """

    ttft_s: float
    itl_s: float
    prompt_tokens: int
    cached_tokens: int


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

    async def measure(self, prompt: list[int], output_tokens: int) -> ResponseTimes:
        """Send a prompt and measure the response.

        Raises:
            PointImpossible: the system rejects the request, or does not respond in time.
            MeasurementFailed: the system does not serve requests.
        """
        body = self._fields | {
            "prompt": prompt,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(msgspec.json.encode(body), output_tokens)
        except TimeoutError:
            raise PointImpossible(f"no complete response within {self._timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise MeasurementFailed(transport_failure(error, streaming=False).text) from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise MeasurementFailed(f"{self._url} sent an event that is not of OpenAI's API: {error!r}") from None

    async def _follow(self, body: bytes, output_tokens: int) -> ResponseTimes:
        headers = {"content-type": "application/json"}
        sent_s = time.perf_counter()
        first_s = last_s = 0.0
        usage: dict[str, Any] = {}
        url = f"{self._url}/v1/completions"
        async with self._client.stream("POST", url, content=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                failure = status_failure(response.status_code, await response.aread())
                kind = PointImpossible if _is_about_request(response.status_code) else MeasurementFailed
                raise kind(f"{failure.kind}: {failure.text}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data in {line, "[DONE]"}:
                    continue
                event = msgspec.json.decode(data)
                if event.get("error"):
                    failure = event_failure(data.encode())
                    raise MeasurementFailed(f"{failure.kind}: {failure.text}")
                usage = event.get("usage") or usage
                if event["choices"]:
                    last_s = time.perf_counter()
                    first_s = first_s or last_s
        if usage.get("completion_tokens") != output_tokens:
            raise MeasurementFailed(f"got {usage.get('completion_tokens')} output tokens, expected {output_tokens}")
        details = usage.get("prompt_tokens_details") or {}
        return ResponseTimes(
            ttft_s=first_s - sent_s,
            itl_s=(last_s - first_s) / (output_tokens - 1) if output_tokens > 1 else 0.0,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
        )


def random_prompts(tokens: int, count: int, seed: str) -> list[list[int]]:
    """Return prompts of random token ids, the same for the same seed. No two of them share a prefix of a KV block."""
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    return [rng.choices(TOKEN_IDS, k=tokens) for _ in range(count)]


def _is_about_request(status: int) -> bool:
    """Return whether the system rejects this request only, for example because the prompt exceeds the context."""
    return httpx.codes.is_client_error(status) and status not in NOT_ABOUT_REQUEST
