"""Where the catalog of a console is."""

from pathlib import Path

from forebay.console.settings import ConsoleSettings
from forebay.replay.catalog.store import path_beside, path_of_brokers


def catalog_path(settings: ConsoleSettings) -> Path:
    folder = None if settings.cache_dir is None else Path(settings.cache_dir)
    if settings.source.path is not None:
        return path_beside(Path(settings.source.path), settings.partition, folder)
    kafka = settings.source.kafka
    assert kafka is not None, "a source is a file or Kafka"
    return path_of_brokers(kafka.bootstrap, kafka.namespace, settings.partition, folder)
