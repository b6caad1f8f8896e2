"""All tables of a catalog, and the observers that fill them."""

from collections.abc import Sequence

from forebay.replay.catalog import checkpoints, gaps
from forebay.replay.catalog.contents import ContentsObserver
from forebay.replay.catalog.mentions import MentionTable
from forebay.replay.catalog.observer import CatalogObserver

SCHEMAS = (checkpoints.SCHEMA, gaps.SCHEMA, ContentsObserver.schema, MentionTable.schema)


def new_observers() -> Sequence[CatalogObserver]:
    return [ContentsObserver(), MentionTable()]
