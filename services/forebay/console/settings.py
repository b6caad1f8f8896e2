"""Settings of a console process."""

from pathlib import Path
from typing import Literal

import msgspec

from forebay.ingress.explain_worker import LogSource
from forebay.replay.catalog.store import path_beside, path_of_brokers

SourceKind = Literal["file", "recording", "kafka"]


class ConsoleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a console shows, and where it serves.

    Attributes:
        name: name of the log for people: the path of a file, or namespace and address of Kafka.
        fields: paths of the router configuration that a what-if comparison can change.
        trace_url: address of a trace, with `{trace_id}`; empty for none.
        ingress_url: address of an ingress with an admin API, which executes actions; empty if there is none.
    """

    source: LogSource
    name: str
    kind: SourceKind = "file"
    group: str
    partition: int = 0
    cache_dir: str | None = None
    host: str = "127.0.0.1"
    port: int
    allow_hosts: tuple[str, ...] = ()
    certfile: str | None = None
    keyfile: str | None = None
    token: str
    ingress_url: str
    fields: tuple[str, ...] = ()
    trace_url: str = ""

    @property
    def is_live(self) -> bool:
        return self.kind != "recording"

    @property
    def can_act(self) -> bool:
        return bool(self.ingress_url)

    @property
    def catalog_path(self) -> Path:
        folder = None if self.cache_dir is None else Path(self.cache_dir)
        if self.source.path is not None:
            return path_beside(Path(self.source.path), self.partition, folder)
        kafka = self.source.kafka
        assert kafka is not None, "a source is a file or Kafka"
        return path_of_brokers(kafka.bootstrap, kafka.namespace, self.partition, folder)
