"""Remember for which requests an engine keeps KV for other workers, until the lease of the KV ends."""

from forebay import runtime


class KeptKv:
    """The requests whose KV an engine may still keep for other workers. Entries vanish when their leases end.

    Use an instance on one event loop only.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, float]] = {}

    def add(self, request_id: str, lease_s: float, engine_id: str = "") -> None:
        """Add a request whose KV the engine keeps.

        Args:
            lease_s: seconds for which the KV is kept.
            engine_id: id of the request in the engine; empty if it has no other id there.
        """
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
