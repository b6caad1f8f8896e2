"""Proposal of a size for one pool, as the methods return it."""

from dataclasses import dataclass, field

from forebay.core.scaling.basis import Basis
from forebay.events.scaling import Reason

SIZE_MAX = 10_000  # the largest size that an event can carry


@dataclass(frozen=True, slots=True)
class Proposal:
    """Size that a method proposes for a pool, before limits and guards.

    Attributes:
        size: number of workers, from 0 to `SIZE_MAX`.
        reason: what is noteworthy about it, for example `profile_exceeded` or `no_demand`; None for an ordinary one.
            With `no_observation`, `no_demand`, `no_profile` or `insufficient_data` the size is the present one.
        basis: numbers from which it follows. They are not part of the comparison of two proposals.
    """

    size: int
    reason: Reason | None = None
    basis: tuple[Basis, ...] = field(default=(), compare=False)
