"""A runtime whose wall clock a test moves; everything else is the operating system's."""

from forebay.runtime.system import SystemRuntime


class FakeRuntime(SystemRuntime):
    """Runtime with a shifted wall clock.

    Attributes:
        wall_shift_s: Seconds added to the wall clock.
    """

    def __init__(self, wall_shift_s: float = 0.0) -> None:
        self.wall_shift_s = wall_shift_s

    def wall_ns(self) -> int:
        """Return the shifted wall clock in nanoseconds since 1970."""
        return super().wall_ns() + round(self.wall_shift_s * 1e9)
