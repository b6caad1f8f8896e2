"""KV that an engine keeps for other workers, each entry until the end of its lease."""

from forebay import runtime


class KeptKv:
    """Requests whose KV may be kept, with the engine's own name of each. Use it on one event loop."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, float]] = {}

    def add(self, request_id: str, lease_s: float, engine_id: str = "") -> None:
        """Add a request whose KV is kept for `lease_s` seconds; `engine_id` is its id in the engine."""
        self._expire()
        self._kept[request_id] = engine_id, runtime.monotonic_s() + lease_s

    def pop(self, request_id: str) -> str | None:
        """Remove a request and return its id in the engine; None if its KV is not kept."""
        self._expire()
        return self._kept.pop(request_id, (None, 0.0))[0]

    def clear(self) -> None:
        """Remove all requests."""
        self._kept.clear()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def __len__(self) -> int:
        self._expire()
        return len(self._kept)

    @property
    def left_s(self) -> float:
        """Seconds until the last lease ends, 0 if nothing is kept."""
        return max(0.0, max((until_s for _, until_s in self._kept.values()), default=0.0) - runtime.monotonic_s())

    def _expire(self) -> None:
        now_s = runtime.monotonic_s()
        self._kept = {name: entry for name, entry in self._kept.items() if entry[1] > now_s}
