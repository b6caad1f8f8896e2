"""Messages from the console to its reader process."""

import msgspec


class Reading(msgspec.Struct, frozen=True, tag_field="type"):
    """Base class of the messages."""


class ReadStatus(Reading, frozen=True, tag="status"):
    at_us: int | None = None


class ReadMoment(Reading, frozen=True, tag="moment"):
    """Derive the state of the group at a time or after a journal record."""

    at_us: int | None = None
    offset: int | None = None


class ReadComparison(Reading, frozen=True, tag="compare"):
    """Compare the states at two times on the owner's clock, in microseconds since 1970."""

    a_us: int
    b_us: int


class ReadExplanation(Reading, frozen=True, tag="explain"):
    """Explain a request: the one submitted at offset `number`, or the one with this ID that was routed last."""

    request_id: str
    number: int | None = None
    with_changes: bool = False


class ReadScaling(Reading, frozen=True, tag="scaling"):
    """Derive the state of the planner at a time on the owner's clock; None for the newest state."""

    at_us: int | None = None


class ReadRecord(Reading, frozen=True, tag="record"):
    topic: str
    offset: int


AnyReading = ReadStatus | ReadMoment | ReadComparison | ReadExplanation | ReadScaling | ReadRecord
