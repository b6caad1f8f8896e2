"""A runtime whose clocks a test moves; everything else is the operating system's."""

from forebay.runtime.system import SystemRuntime


class FakeRuntime(SystemRuntime):
    """Runtime with shifted clocks.

    Attributes:
        wall_shift_s: Seconds added to the wall clock.
        monotonic_shift_s: Seconds added to the monotonic clock.
    """

    def __init__(self, wall_shift_s: float = 0.0, monotonic_shift_s: float = 0.0) -> None:
        self.wall_shift_s = wall_shift_s
        self.monotonic_shift_s = monotonic_shift_s

    def wall_ns(self) -> int:
        """Return the shifted wall clock in nanoseconds since 1970."""
        return super().wall_ns() + round(self.wall_shift_s * 1e9)

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + round(self.monotonic_shift_s * 1e9)
