"""Create and check the descriptors of KV that an engine transfers with its own connector, such as vLLM's."""

from collections.abc import Callable
from typing import TypeVar

from forebay import runtime
from forebay.events.codec import MALFORMED
from forebay.events.transfer import DESCRIPTOR_BYTES_MAX, Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import AttemptFailed

Decoded = TypeVar("Decoded")


class KeptKv:
    """The requests whose KV an engine may still keep for other workers. Entries vanish when their leases end.

    Use an instance on one event loop only.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, float]] = {}

    def add(self, request_id: str, lease_s: float, engine_id: str = "") -> None:
        """Add a request whose KV the engine keeps, with its id in the engine if that differs."""
        self._expire()
        self._kept[request_id] = engine_id, runtime.monotonic_s() + lease_s

    def pop(self, request_id: str) -> str | None:
        """Remove a request, and return its id in the engine; None if its KV is no longer kept."""
        self._expire()
        return self._kept.pop(request_id, (None, 0.0))[0]

    def clear(self) -> None:
        self._kept.clear()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def __len__(self) -> int:
        self._expire()
        return len(self._kept)

    @property
    def left_s(self) -> float:
        """Seconds until the lease that ends last has ended; 0 if no KV is kept."""
        return max(0.0, max((until_s for _, until_s in self._kept.values()), default=0.0) - runtime.monotonic_s())

    def _expire(self) -> None:
        now_s = runtime.monotonic_s()
        self._kept = {name: entry for name, entry in self._kept.items() if entry[1] > now_s}


class Unfetchable(AttemptFailed):
    """An engine cannot fetch the KV of a prompt, or cannot offer it. The message gives the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(500, "engine_error", message)


def decoded(
    prefilled: Prefilled | None, connector: str, model: str, prompt_tokens: int, decode: Callable[[bytes], Decoded]
) -> Decoded:
    """Return the content of the KV descriptor of a request, if this worker can fetch the KV.

    Raises Unfetchable if there is no descriptor, it is for another connector, model or prompt length, or it cannot be
    decoded.
    """
    if prefilled is None:
        raise Unfetchable("the request has no KV descriptor")
    if prefilled.connector != connector:
        raise Unfetchable(f"its KV is transferred by {prefilled.connector}, this worker uses {connector}")
    if prefilled.model != model:
        raise Unfetchable(f"its KV is of model {prefilled.model}, this worker runs {model}")
    if prefilled.tokens != prompt_tokens:
        raise Unfetchable(f"its KV covers {prefilled.tokens} tokens, the prompt has {prompt_tokens}")
    try:
        return decode(prefilled.descriptor)
    except MALFORMED as error:
        raise Unfetchable(f"cannot decode the KV descriptor: {error}") from error


def offered(
    item: WorkItem, worker_id: str, model: str, connector: str, descriptor: bytes, *, tokens: int, lease_s: float
) -> Prefilled:
    """Return the descriptor of KV that this worker has computed and keeps, as a field of an event.

    Raises Unfetchable if `descriptor` is longer than `DESCRIPTOR_BYTES_MAX`.
    """
    if len(descriptor) > DESCRIPTOR_BYTES_MAX:
        size = len(descriptor)
        raise Unfetchable(f"the KV descriptor has {size} bytes, more than {DESCRIPTOR_BYTES_MAX}")
    return Prefilled(
        worker_id=worker_id,
        worker_epoch=item.worker_epoch,
        model=model,
        connector=connector,
        descriptor=descriptor,
        tokens=tokens,
        lease_us=int(lease_s * 1e6),
    )
