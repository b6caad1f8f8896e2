"""`forebay model`: store and list model cards."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec
import typer
from rich.table import Table

from forebay.cli.common.cluster_options import KafkaOptions
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.terminal import in_markup, results
from forebay.cli.processes.model_source import find_model
from forebay.events.models import ModelCard, ModelStored
from forebay.ingress.model_cards import read_card
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import count_topics
from forebay.transport.models import ModelStore
from forebay.transport.recording.manifest import utc


def run_publish(*, model: str, revision: str | None, model_name: str, kafka: KafkaOptions) -> None:
    """Run `forebay model publish`. command.py documents its options."""
    with explained():
        directory, name = find_model(model, revision, model_name, weights=False)
        assert directory is not None
        read = read_card(directory)
        if read is None:
            fail(f"{directory} has no tokenizer.json; an ingress cannot tokenize for this model")
        digest = asyncio.run(_publish(kafka.settings(), name, *read))
    typer.echo(digest)


def run_list(*, kafka: KafkaOptions, json: bool) -> None:
    """Run `forebay model list`. command.py documents its options."""
    with explained():
        found = asyncio.run(_list(kafka.settings()))
    if json:
        for digest, stored in found:
            card = {"digest": digest, "model": stored.model, "stored_us": stored.at_us, "card": stored.card}
            typer.echo(msgspec.json.encode(card))
        return
    if not found:
        typer.echo("no model cards")
        return
    table = Table("digest", "model", "stored", "context", "bytes", box=None)
    for digest, stored in found:
        size = sum(file.size for file in stored.card.files)
        cells = digest[:16], in_markup(stored.model), utc(stored.at_us), str(stored.card.context_tokens), str(size)
        table.add_row(*cells)
    results().print(table)


async def _publish(settings: KafkaSettings, name: str, card: ModelCard, files: Mapping[str, bytes]) -> str:
    async with _store(settings) as store:
        return await store.store(name, card, files)


async def _list(settings: KafkaSettings) -> list[tuple[str, ModelStored]]:
    async with _store(settings) as store:
        return sorted(store.cards.items(), key=lambda one: -one[1].at_us)


@asynccontextmanager
async def _store(settings: KafkaSettings) -> AsyncIterator[ModelStore]:
    """Connect to the topic `models`. Raises LogError if Kafka has no topics of forebay."""
    await count_topics(settings)
    log = await KafkaLog.open(settings)
    store = ModelStore(log)
    try:
        await store.start()
        yield store
    finally:
        store.close()
        await log.close()
