"""Interface between the pass over a log and the tables of a catalog.

Theory of operation. A `CatalogObserver` owns some tables. The pass reports each event and each journal record to all
observers, in the owner's order. Observers keep their changes in memory until `write`, which the pass calls in the
transaction that also commits its position. So a resumed pass neither misses nor repeats an event.

Events after the newest journal record are different: the owner has not counted them yet, and their clock readings are
unknown. Observers keep their effect apart from the recorded tables. The same events come again through `on_applied`
once a journal record counts them, and only then they enter metrics.
"""

import sqlite3
from collections.abc import Sequence
from typing import ClassVar

from forebay.core.step import AnyDecision, InputEvent
from forebay.core.world import World
from forebay.events.decisions import JournalRecord


class CatalogObserver:
    """Fills tables of a catalog from the events and decisions of a log. It must not change the world.

    `schema` has the statements that create the tables and indexes, executed once on a new catalog.
    """

    schema: ClassVar[str]

    def open(self, connection: sqlite3.Connection, world: World) -> None:
        """Load what a pass needs that continues after the committed rows, in the state `world`."""

    def on_applied(
        self, topic: str, event: InputEvent | None, now_us: int, decisions: Sequence[AnyDecision], world: World
    ) -> None:
        """Observe an input event that a journal record counts, right after the owner's world has applied it.

        Args:
            event: the event; None for a clock run and for a record that does not decode.
            decisions: decisions that the event leads to. Each comes again through `on_record` once it is journaled.
            world: state after the event. `world.view[topic] - 1` is the event's offset.
        """

    def on_record(self, offset: int, record: JournalRecord, world: World) -> None:
        """Observe a journal record that was derived again, or a claim, after the events that the record consumes."""

    def resume(self, world: World) -> None:
        """Continue in this world, from which an owner continued after records that do not lead to it."""

    def clear_unrecorded(self) -> None:
        """Forget all events of `on_unrecorded`. The pass calls this before it reports the events of a new tail."""

    def on_unrecorded(self, topic: str, offset: int, event: InputEvent | None, at_us: int) -> None:
        """Observe an event after the newest journal record, in append order; None if it does not decode.

        The pass may leave out KV events and load reports, and may stop after any number of events. `at_us` is in Unix
        time.
        """

    def write(self, connection: sqlite3.Connection) -> None:
        """Write all changes since the last call, in the transaction that the caller commits with its position."""

    def remove_before(self, connection: sqlite3.Connection, offset: int, now_us: int) -> None:
        """Remove rows about journal records before `offset`, and rows about times before `now_us` on the owner's clock.

        Called when the catalog has reached its maximum size. Rows about requests that have not ended stay.
        """
