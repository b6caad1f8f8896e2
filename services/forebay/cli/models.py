"""`forebay model`: list and remove model cards, and set aliases."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Collection, Iterator, Set
from contextlib import asynccontextmanager

import click
import msgspec

from forebay.cli.command import ModelAliasCommand, ModelListCommand, ModelRemoveCommand
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.operator_name import operator_name
from forebay.cli.common.recording import kafka_log
from forebay.cli.common.tables import print_table
from forebay.cli.common.terminal import printable
from forebay.events.answers import RETENTION_S
from forebay.events.models import TARGETS_MAX, WEIGHT_MAX, AliasSet, AliasTarget, ModelStored
from forebay.events.names import unknown_name
from forebay.events.topics import GROUPS
from forebay.journal.groups import groups_of, workers_of
from forebay.processes.names import named
from forebay.processes.notices import complain
from forebay.transport.base import Draft, Log
from forebay.transport.directory import PARTITION
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import count_topics
from forebay.transport.models import ModelStore, cards_in_use, needed_by_answers
from forebay.transport.sqlite.recording import utc

DIGEST = re.compile("[0-9a-f]{8,64}")  # at least so many digits, so that a short name of a model is no digest
SHOWN_DIGITS = 16


def run_list(options: ModelListCommand) -> None:
    with explained():
        cards, aliases = asyncio.run(_list(options.kafka.settings()))
    if options.json:
        for digest, stored in cards:
            card = {"digest": digest, "model": stored.model, "stored_us": stored.at_us, "card": stored.card}
            click.echo(msgspec.json.encode(card))
        for alias in aliases:
            click.echo(msgspec.json.encode(alias))
        return
    if not cards and not aliases:
        click.echo("no model cards")
        return
    rows = []
    for digest, stored in cards:
        size = sum(file.size for file in stored.card.files)
        shown = digest[:SHOWN_DIGITS]
        rows.append((shown, stored.model, utc(stored.at_us), str(stored.card.context_tokens), str(size)))
    print_table(("digest", "model", "stored", "context", "bytes"), rows)
    for alias in aliases:
        click.echo(f"alias {printable(alias.alias)}: {_described(alias)}")


def run_remove(options: ModelRemoveCommand) -> None:
    with explained():
        removed = asyncio.run(_remove(options.kafka.settings(), options.name, force=options.force))
    for text in removed:
        click.echo(f"removed {text}")


async def _remove(settings: KafkaSettings, name: str, *, force: bool) -> list[str]:
    """Remove the cards that `name` means, and the group of a model. A reason to keep them ends the command.

    Returns the digests, and a text about the group.
    """
    async with _opened(settings) as (log, store):
        partitions = await groups_of(log)
        model, digests = _meant(store, name, partitions)
        if name in partitions and (workers := await workers_of(log, partitions[name])):
            fail(f"{printable(name)} has workers: {', '.join(sorted(workers))}; stop them first")
        used = await cards_in_use(log, partitions)
        for group, digest in sorted(used.items()):
            if digest in digests:
                fail(f"workers of {printable(group)} use the card {digest[:SHOWN_DIGITS]} of {model}; stop them first")
        needed: set[str] = set() if force else await needed_by_answers(log, store)
        if found := [digest[:SHOWN_DIGITS] for digest in digests if digest in needed]:
            text = f"answers, which are kept for {RETENTION_S // 86_400} days, may need the card {found[0]} of {model}"
            fail(f"{text}; --force removes it nevertheless")
        await store.remove(digests)
        if name not in partitions:
            return digests
        await log.append([Draft(GROUPS.name, PARTITION, b"", name.encode())])
        return [*digests, f"the group {printable(name)}, so control partition {partitions[name]} is free"]


def _meant(store: ModelStore, name: str, groups: Collection[str]) -> tuple[str, list[str]]:
    """Return the model and the digests of the cards that an argument means. An invalid argument ends the command."""
    by_model: dict[str, list[str]] = {group: [] for group in groups}
    for digest, stored in store.cards.items():
        by_model.setdefault(stored.model, []).append(digest)
    if name in by_model:
        aliases = [
            one.alias for one in store.aliases.values() if name in (one.fallback, *(t.model for t in one.targets))
        ]
        if aliases:
            fail(f"the alias {printable(aliases[0])} names {name}; move it or remove it first (forebay model alias)")
        return name, by_model[name]
    found = [digest for digest in store.cards if digest.startswith(name)] if DIGEST.fullmatch(name) else []
    if len(found) > 1:
        fail(f"{name} begins {len(found)} digests; give more digits")
    if not found:
        fail(f"NAME|DIGEST: {unknown_name('model', name, sorted(by_model))}; `forebay model list` shows the digests")
    model = store.cards[found[0]].model
    if found[0] == by_model[model][-1]:
        fail(
            f"{found[0][:SHOWN_DIGITS]} is the newest card of {printable(model)}; `forebay model remove"
            f" {printable(model)}` removes all cards of this model"
        )
    return printable(model), found


def run_alias(options: ModelAliasCommand) -> None:
    if options.remove == bool(options.targets):
        fail("expected either models or --remove")
    if options.fallback and options.remove:
        fail("--fallback requires models")
    with explained():
        event = AliasSet(
            alias=named("ALIAS", "model", options.name),
            targets=tuple(map(_target, options.targets or ())),
            fallback=named("--fallback", "model", options.fallback) if options.fallback else "",
            operator=operator_name(options.operator),
            at_us=time.time_ns() // 1000,
        )
        if len(event.targets) > TARGETS_MAX:
            fail(f"expected at most {TARGETS_MAX} models, got {len(event.targets)}")
        asyncio.run(_set_alias(options.kafka.settings(), event, force=options.force))
    click.echo(f"alias {printable(options.name)}: {_described(event) if options.targets else 'removed'}")


def _target(text: str) -> AliasTarget:
    """Parse MODEL or MODEL=WEIGHT. A text of another form ends the command."""
    model, separator, weight = text.rpartition("=")
    if not separator:
        return AliasTarget(model=named("MODEL", "model", text))
    try:
        share = float(weight)
    except ValueError:
        share = 0.0
    if not 0 < share <= WEIGHT_MAX:
        fail(f"MODEL=WEIGHT: expected a weight above 0 and at most {WEIGHT_MAX:g}, got {text!r}")
    return AliasTarget(model=named("MODEL", "model", model), weight=share)


def _described(alias: AliasSet) -> str:
    total = sum(target.weight for target in alias.targets)
    shares = ", ".join(f"{printable(target.model)} {target.weight / total:.0%}" for target in alias.targets)
    return shares + (f", fallback {printable(alias.fallback)}" if alias.fallback else "")


async def _set_alias(settings: KafkaSettings, event: AliasSet, *, force: bool) -> None:
    async with _opened(settings) as (log, store):
        known = {*await groups_of(log), *(stored.model for stored in store.cards.values())}
        for problem in _alias_problems(event, known, store.aliases):
            if not force:
                fail(f"{problem}; --force sets the alias nevertheless")
            complain(f"warning: {problem}")
        await store.set_alias(event)


def _alias_problems(event: AliasSet, known: Set[str], aliases: Collection[str]) -> Iterator[str]:
    """Yield why requests for an alias would fail or ignore the alias. `known` has the models of the namespace."""
    if event.targets and event.alias in known:
        yield f"{event.alias} is the name of a model, so requests for it never use the alias"
    for name in dict.fromkeys((*(target.model for target in event.targets), *filter(None, [event.fallback]))):
        if name not in known and (name in aliases or name == event.alias):
            yield f"{name} is an alias, and an alias must name models"
        elif name not in known:
            yield unknown_name("model", name, sorted(known))


async def _list(settings: KafkaSettings) -> tuple[list[tuple[str, ModelStored]], list[AliasSet]]:
    async with _opened(settings) as (_, store):
        cards = sorted(store.cards.items(), key=lambda one: -one[1].at_us)
        return cards, [alias for _, alias in sorted(store.aliases.items())]


@asynccontextmanager
async def _opened(settings: KafkaSettings) -> AsyncIterator[tuple[Log, ModelStore]]:
    """Connect to Kafka and its topic `models`. Raises LogError if Kafka has no topics of forebay."""
    await count_topics(settings)
    async with kafka_log(settings) as log:
        store = ModelStore(log)
        try:
            await store.start()
            yield log, store
        finally:
            store.close()
