"""Topic `spans`: up to where `forebay spans` has exported the spans of a control partition. Replays do not use it."""

from typing import Annotated

from forebay.events.base import Count, Event
from forebay.events.positions import JournalPosition
from forebay.events.privacy import DROPPED


class SpansExported(Event, tag="spans.exported", frozen=True, kw_only=True):
    """The receiver has accepted the spans of all requests that ended before a journal offset.

    Attributes:
        receiver: address of the receiver. Each receiver has a position of its own.
        begin: where a reader must begin to know the requests in flight at `until_offset`.
        until_offset: offset after the last journal record whose ended requests were exported.
    """

    receiver: Annotated[str, DROPPED]
    begin: JournalPosition
    until_offset: Count
