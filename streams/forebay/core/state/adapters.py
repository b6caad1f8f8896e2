"""Catalog of the LoRA adapters that the owner places on workers, and when each worker loaded and used them.

An adapter is in the catalog from a `load_lora` with automatic placement until an operator unloads it. The owner never
unloads other adapters.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from forebay.core.state.active_request import ActiveRequest
from forebay.core.state_machine import digest_of, plain
from forebay.events.base import U64_MASK
from forebay.events.snapshots import AdapterFailure, AdapterHolder, AdapterState

ADAPTERS_MAX = 1_024  # as many as the list of a worker may have


class AdapterCatalog:
    """Adapters that the owner places, by name, in the order in which they were added.

    Attributes:
        stranded: accepted requests that lost their worker and wait for an adapter. It may contain others. Not part of
            the state, because it follows from the requests.
    """

    def __init__(self) -> None:
        self.stranded: dict[str, None] = {}
        self._placed: dict[str, AdapterState] = {}
        self._blocked: dict[str, int] = {}  # `retry_us` of the adapters that have one, because every event reads it

    def __len__(self) -> int:
        return len(self._placed)

    def get(self, name: str) -> AdapterState | None:
        return self._placed.get(name)

    def names(self) -> tuple[str, ...]:
        return tuple(self._placed)

    def put(self, adapter: AdapterState) -> None:
        """Add an adapter, or replace its state."""
        self._placed[adapter.lora_name] = adapter
        self._blocked.pop(adapter.lora_name, None)
        if adapter.retry_us:
            self._blocked[adapter.lora_name] = adapter.retry_us

    def remove(self, name: str) -> None:
        del self._placed[name]
        self._blocked.pop(name, None)

    def sync(self, worker_id: str, loras: Iterable[str], now_us: int) -> None:
        """Record which adapters a worker has loaded now; none if it left."""
        loaded = frozenset(loras)
        for name, one in self._placed.items():
            if (name in loaded) != any(holder.worker_id == worker_id for holder in one.holders):
                self._hold(one, worker_id, (now_us, now_us) if name in loaded else None)

    def use(self, name: str, worker_id: str, now_us: int) -> None:
        """Record that a worker gets a request for an adapter, if the adapter is in the catalog."""
        one = self._placed.get(name)
        holder = None if one is None else next((one for one in one.holders if one.worker_id == worker_id), None)
        if one is not None and holder is not None:
            self._hold(one, worker_id, (holder.loaded_us, now_us))

    def fail(self, name: str, worker_id: str, until_us: int, reason: str) -> None:
        """Record that a worker could not load an adapter, and is not tried until `until_us`; 0 if it loaded it."""
        if (one := self._placed.get(name)) is None:
            return
        others = tuple(failure for failure in one.failures if failure.worker_id != worker_id)
        failed = (AdapterFailure(worker_id=worker_id, until_us=until_us, reason=reason),) if until_us else ()
        self.put(replace(one, failures=(*others, *failed)))

    def unblock(self, now_us: int) -> None:
        """Let the owner try again to place adapters whose time has come."""
        for name in [name for name, retry_us in self._blocked.items() if retry_us <= now_us]:
            self.put(replace(self._placed[name], retry_us=0))

    def strand(self, request: ActiveRequest) -> None:
        """Note that an accepted request without a worker waits, if its adapter is in the catalog."""
        if request.submitted.lora_name in self._placed:
            self.stranded[request.submitted.request_id] = None

    def next_due_us(self) -> int | None:
        """Return when the owner tries again to place an adapter, in microseconds on its clock, or None."""
        return min(self._blocked.values()) if self._blocked else None

    def digest(self) -> int:
        """Return a 64-bit digest, the sum of a term per adapter. It is 0 without any, as in logs without catalogs."""
        return sum(digest_of("adapter", plain(one)) for one in self._placed.values()) & U64_MASK

    def snapshot(self) -> list[AdapterState]:
        return list(self._placed.values())

    def _hold(self, one: AdapterState, worker_id: str, times: tuple[int, int] | None) -> None:
        others = tuple(holder for holder in one.holders if holder.worker_id != worker_id)
        mine = () if times is None else (AdapterHolder(worker_id=worker_id, loaded_us=times[0], used_us=times[1]),)
        self.put(replace(one, holders=(*others, *mine)))
