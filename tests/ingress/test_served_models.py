"""The models of a distributed system, as an ingress without a model directory finds and loads them."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterable
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay.events.base import Event
from forebay.events.codec import encode
from forebay.events.control import PoolConfigured
from forebay.events.fleet import WorkerJoined, WorkerSpec
from forebay.events.groups import GroupPlaced
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.models import AliasSet, AliasTarget, ModelFile
from forebay.events.request_ids import http_request_id
from forebay.events.tokens import ResponseEnded
from forebay.events.topics import CONTROL, FLEET, GROUPS, HEARTBEATS, TOKENS, Topic
from forebay.ingress import admission
from forebay.ingress import served_models as module
from forebay.ingress.errors import ApiError
from forebay.ingress.front import Front
from forebay.ingress.group import Readiness
from forebay.ingress.http.app import build_app
from forebay.ingress.loaded_model import LoadedModel
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import DEFAULT_MODEL, InvalidModel, Model
from forebay.ingress.model_cards import read_card
from forebay.ingress.served_models import ServedModels
from forebay.ingress.settings import ALL_MODELS, IngressSettings
from forebay.ingress.streams import Stream
from forebay.transport import heartbeats
from forebay.transport.base import Draft
from forebay.transport.directory import Directory
from forebay.transport.models import ModelStore
from forebay.transport.sqlite.log import SqliteLog
from tests.ingress.conftest import ADMIN_TOKEN, client_of, error
from tests.system import until

MODELS = ("one", "two", "three")


class Scene:
    """All models of an embedded log, on which the test writes what routers and workers would write."""

    def __init__(self, log: SqliteLog, models: ServedModels, store: ModelStore, loaded: list[str]) -> None:
        self.log = log
        self.models = models
        self.loaded = loaded
        self._store = store

    async def append(self, topic: Topic, partition: int, event: Event, key: str = "") -> None:
        await self.log.append([Draft(topic.name, partition, encode(topic, event), key.encode())])

    async def store(self, changes: dict[str, bytes] | None = None, context_tokens: int = 4_096) -> str:
        """Store a card of the default model with changed files, and return its digest."""
        read = read_card(DEFAULT_MODEL)
        assert read is not None
        card, files = read[0], read[1] | (changes or {})
        listed = [ModelFile(name=name, sha256=sha256(part).hexdigest(), size=len(part)) for name, part in files.items()]
        card = msgspec.structs.replace(card, files=tuple(listed), context_tokens=context_tokens)
        return await self._store.store("m", card, files)

    async def remove(self, digest: str) -> None:
        await self._store.remove([digest])

    async def serve(self, name: str, card: str, *, ready: int = 1) -> None:
        """Report that the owner of a model has ready workers with this card, and wait until the ingress knows it."""
        beat = RouterHeartbeat(
            group=name, router_id="r", role="owner", owner_epoch=7, ready_aggregated=ready, card=card
        )
        await self.append(HEARTBEATS, MODELS.index(name), beat)
        await self.append(CONTROL, MODELS.index(name), PoolConfigured(pool="default", model=name, block_size=16))
        await until(lambda: (name in {one.name for one in self.models.ready()}) is bool(ready))

    async def serve_all(self, *names: str) -> str:
        """Store one card, and report that each of these models has a worker with it. Return the digest of the card."""
        digest = await self.store()
        for name in names:
            await self.serve(name, digest)
        return digest

    async def chosen(self, alias: str, ids: Iterable[str]) -> list[str]:
        """Return the name of the model of each request."""
        return [(await self.models.find(alias, name)).loaded.group.settings.model_name for name in ids]

    async def find(self, name: str) -> LoadedModel:
        return (await self.models.find(name, "r")).loaded

    async def fails(self, name: str, status: int, code: str, says: str = ".") -> None:
        """Check that requests for a model get this error."""
        with pytest.raises(ApiError, match=says) as caught:
            await self.find(name)
        assert (caught.value.status, caught.value.code) == (status, code)

    async def alias(self, name: str, *targets: str, fallback: str = "", weight: float = 1.0) -> None:
        """Set an alias whose first target has this weight, and wait until the ingress knows it."""
        shares = [AliasTarget(model=target, weight=1.0 if at else weight) for at, target in enumerate(targets)]
        event = AliasSet(alias=name, targets=tuple(shares), fallback=fallback)
        await self._store.set_alias(event)
        await until(lambda: self._store.aliases.get(name) == (event if targets else None))

    async def listed(self) -> dict[str, int]:
        return {card["id"]: card["max_model_len"] for card in await self.models.cards()}


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(heartbeats, "OWNER_SILENT_S", 3_600.0)  # each test writes few heartbeats
    log = SqliteLog.open(None)
    directory, store = Directory(log), ModelStore(log)
    settings = IngressSettings(model_name=ALL_MODELS, ingress_id="i", admin_token=ADMIN_TOKEN)
    front = Front(log, settings, IngressMetrics(CollectorRegistry(), None), 0)
    loaded: list[str] = []
    models = ServedModels(front, directory, store, tmp_path, loaded.append)
    made = Scene(log, models, store, loaded)
    for partition, name in enumerate(MODELS):
        await made.append(GROUPS, 0, GroupPlaced(group=name, partition=partition), name)
    await directory.start()
    await store.start()
    running = [asyncio.create_task(models.run()), asyncio.create_task(front.run())]
    await asyncio.sleep(0)
    yield made
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    log.close()


def files_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_a_model_is_loaded_at_its_first_request(scene: Scene) -> None:
    await scene.serve_all("one")
    assert await scene.listed() == {"one": 4_096}
    assert scene.loaded == []
    found = await scene.find("one")
    assert found.group.settings.model_name == "one"
    assert found.model.decode(found.model.encode("hello")) == "hello"
    assert await scene.find("one") is found
    assert scene.loaded == ["one"]


async def test_an_unknown_model_is_rejected_with_the_listed_ones(scene: Scene) -> None:
    await scene.serve_all("two")
    await scene.fails("no", 404, "model_not_found", r"'no'.*two")
    assert (await scene.models.only("")).name == "two", "models without workers do not count"
    await scene.serve_all("one")
    with pytest.raises(ApiError, match=r"name a model, as in \?model=NAME; models are: one, three, two"):
        await scene.models.only("")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.json": b"{}"}, "not a valid tokenizer"),
        ({"config.json": b"no"}, "not valid JSON"),
        ({"chat_template.jinja": b"\xff"}, "a chat template is not valid UTF-8"),
        ({"../config.json": b"{}"}, r"unknown files: \.\./config\.json"),
    ],
)
async def test_a_card_that_cannot_be_used_is_an_error(
    scene: Scene, changes: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    await scene.serve("one", await scene.store(changes))
    await scene.fails("one", 503, "model_card_unusable", message)
    assert files_in(tmp_path) == []


async def test_a_card_has_every_file_that_prompts_depend_on(scene: Scene, tmp_path: Path) -> None:
    texts = {
        "config.json": '{"text_config": {"max_position_embeddings": 512, "eos_token_id": 7}}',
        "special_tokens_map.json": '{"bos_token": "<s>"}',
        "tokenizer_config.json": "{}",
        "chat_template.json": '{"chat_template": "{{ bos_token }} {{ messages[0].name }}"}',
        "additional_chat_templates/tool_use.jinja": "{{ bos_token }} {{ tools | tojson }}",
    }
    directory = tmp_path / "model"
    (directory / "additional_chat_templates").mkdir(parents=True)
    (directory / "tokenizer.json").write_bytes((DEFAULT_MODEL / "tokenizer.json").read_bytes())
    for name, text in texts.items():
        (directory / name).write_text(text)
    read = read_card(directory)
    assert read is not None
    card, files = read
    assert card.context_tokens == 512
    assert [file.name for file in card.files] == sorted(["tokenizer.json", *texts])
    await scene.serve("one", await scene.store(files, card.context_tokens))
    model = (await scene.find("one")).model
    assert model.context_tokens == 512
    assert model.end_ids == {7}
    hello = {"role": "user", "name": "alice", "content": "hello"}
    assert model.render([hello]) == "<s> alice"
    assert model.render([hello], [{"type": "function"}]) == '<s> [{"type": "function"}]'


async def test_a_card_that_is_not_stored_is_an_error(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CARD_S", 0.01)
    await scene.serve("one", "0" * 64)
    assert await scene.listed() == {}
    await scene.fails("one", 503, "no_model_card", "is not on the topic models")


async def test_a_card_that_is_removed_and_stored_again_is_loaded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded model goes on without its card. A model that is not loaded yet fails until a worker stores the card."""
    monkeypatch.setattr(module, "CARD_S", 0.01)
    monkeypatch.setattr(module, "FAILED_S", 0.0)
    digest = await scene.serve_all("one", "two")
    loaded = await scene.find("one")
    await scene.remove(digest)
    assert await scene.find("one") is loaded
    await scene.fails("two", 503, "no_model_card", f"the model card {digest} of two is not on the topic models")
    assert await scene.store() == digest
    assert (await scene.find("two")).model.decode([1]) == loaded.model.decode([1])


async def test_a_response_is_rendered_with_the_card_of_its_request(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the workers have another card. A model from a directory has no card, and is the same one."""
    monkeypatch.setattr(module, "OLDER_MAX", 1)
    cards = [await scene.store(context_tokens=size) for size in (100, 200, 300)]
    await scene.serve("one", cards[2])

    async def context(card: str) -> int:
        return (await scene.models.rendering_model("one", card)).model.context_tokens

    assert [await context(card) for card in (cards[2], "", cards[0], cards[0], cards[1])] == [300, 300, 100, 100, 200]
    assert (await scene.find("one")).model.context_tokens == 300
    assert scene.loaded == ["one"] * 3, "the most recent ones stay loaded"
    await scene.remove(cards[0])
    for name, card, status, code in (
        ("one", cards[0], 410, "model_card_removed"),
        ("gone", cards[1], 404, "model_not_found"),
    ):
        with pytest.raises(ApiError, match=card if status == 410 else name) as caught:
            await scene.models.rendering_model(name, card)
        assert (caught.value.status, caught.value.code) == (status, code)


async def test_only_models_of_this_process_are_served(scene: Scene, tmp_path: Path) -> None:
    """`forebay up` knows its owners without heartbeats. Other models on its log have no owner."""
    digest = await scene.store()
    directory, store = Directory(scene.log), ModelStore(scene.log)
    await directory.start()
    await store.start()
    beat = RouterHeartbeat(group="two", router_id="r", role="owner", ready_aggregated=1, card=digest)
    presence = heartbeats.RouterHeartbeats(scene.log, "two", lambda: 0.0)
    presence.owner = beat
    ready = {"two": Readiness(presence, directory)}
    models = ServedModels(scene.models.front, directory, store, tmp_path, scene.loaded.append, ready.get)
    running = asyncio.create_task(models.run())
    await until(lambda: models.names == ["two"])
    await models.load_all()
    assert scene.loaded == ["two"]
    assert [card["id"] for card in await models.cards()] == ["two"]
    assert (await models.find("two", "r")).loaded.group.settings.model_name == "two"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_workers_without_a_card_cannot_be_used(scene: Scene) -> None:
    await scene.serve("one", "")
    assert "one: its workers have stored no model card" in (scene.models.why_not_ready() or "")
    await scene.fails("one", 503, "not_ready", "its workers have stored no model card")


async def test_an_adapter_is_unknown_only_once_all_models_have_listed_theirs(scene: Scene) -> None:
    """Without an owner the workers cannot list their adapters."""
    spec = WorkerSpec(
        worker_id="w",
        model="one",
        block_size=16,
        kv_blocks_total=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        loras=("sql",),
    )
    joined = WorkerJoined(owner_epoch=7, spec=spec, lease="t", slot=0, from_offset=0)
    await scene.append(FLEET, 0, joined)
    await scene.fails("sql", 503, "adapters_unknown")


async def test_a_model_may_leave_while_it_is_listed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    is_listing, has_left = asyncio.Event(), asyncio.Event()

    async def names() -> tuple[str, ...]:
        is_listing.set()
        await has_left.wait()
        return ()

    monkeypatch.setattr(module, "LISTED_S", 3_600.0)
    digest = await scene.serve_all("one")
    (entry,) = scene.models.ready()
    monkeypatch.setattr(entry.group.adapters, "names", names)
    listing = asyncio.create_task(scene.listed())
    await is_listing.wait()
    await scene.serve("one", "", ready=0)
    await scene.remove(digest)
    has_left.set()
    assert list(await listing) == ["one"]
    assert await scene.listed() == {}


async def test_a_card_may_be_removed_twice(scene: Scene) -> None:
    digest = await scene.store()
    await scene.remove(digest)
    await scene.remove(digest)


async def test_readiness_names_what_each_model_lacks(scene: Scene) -> None:
    assert scene.models.why_not_ready() is not None
    await scene.serve("one", await scene.store())
    assert scene.models.why_not_ready() is None
    assert scene.models.ready_details == {"models": "one"}
    await scene.serve("one", "", ready=0)
    assert "one: no worker is ready" in (scene.models.why_not_ready() or "")


async def test_a_new_card_replaces_the_loaded_one(scene: Scene) -> None:
    await scene.serve("one", await scene.store())
    older = await scene.find("one")
    stream = older.group.replies.add("request", Stream())
    await scene.serve("one", "", ready=0)
    digest = await scene.store(context_tokens=99)
    await scene.serve("one", digest)
    await until(lambda: scene.models.ready()[0].card == digest)
    newer = await scene.find("one")
    assert newer is not older
    assert await scene.listed() == {"one": 99}
    newer.group.front.slot.interrupt_all("stop")
    assert stream.interrupt_reason == "stop", "requests of the replaced model go on"


async def test_the_model_that_was_not_used_for_the_longest_time_is_freed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "LOADED_MAX", 2)
    await scene.serve_all(*MODELS)
    loaded = {name: weakref.ref((await scene.find(name)).model) for name in ("one", "two", "one", "three")}
    gc.collect()
    assert {name for name, model in loaded.items() if model() is not None} == {"one", "three"}
    assert len(files_in(tmp_path)) == 2, "the files of a model are removed with it"


async def test_a_response_of_a_dropped_model_goes_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOADED_MAX", 1)
    await scene.serve_all("one", "two")
    dropped = await scene.find("one")
    stream = dropped.group.replies.add("request", Stream())
    await scene.find("two")
    end = ResponseEnded(request_id="request", attempt=1, owner_epoch=7, group="one", finish_reason="stop")
    await scene.append(TOKENS, 0, end)
    await until(lambda: stream.ended is not None)


async def test_a_card_that_cannot_be_loaded_is_not_tried_again_by_each_request(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    async def fail(_: ModelStore, digest: str, __: Path) -> Model:
        opened.append(digest)
        raise InvalidModel("broken")

    monkeypatch.setattr(module, "open_model", fail)
    digest = await scene.serve_all("one")
    results = await asyncio.gather(*(scene.find("one") for _ in range(5)), return_exceptions=True)
    assert {str(result) for result in results} == {"the model card of one: broken"}
    assert opened == [digest]
    errors = [result for result in results if isinstance(result, ApiError)]
    assert len({id(error) for error in errors}) == len(results), "a shared error would keep the frames of all requests"


async def test_the_full_pool_of_a_model_does_not_reject_requests_for_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "FULL_S", 3_600.0)
    await scene.serve_all("one", "two")
    (await scene.find("one")).group.observe(ApiError(429, "pool_full", "full"))
    body = {"prompt": "a", "max_tokens": 1}
    async with client_of(build_app(scene.models, CollectorRegistry())) as client:
        response = await client.post("/v1/completions", json={"model": "one", **body})
        assert error(response) == (429, "pool_full")
        assert (await client.post("/tokenize", json={"model": "one", "prompt": "a"})).status_code == 200
    (await scene.find("two")).group.require_capacity("completions")
    scene.models.front.admission.enter()
    assert await scene.find("one") is not None, "the Kafka API lets its requests wait in the router's queue"


async def test_routes_about_a_model_work_without_its_card(scene: Scene) -> None:
    async with client_of(build_app(scene.models, CollectorRegistry())) as client:
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        for path, method, status, code in (
            ("/v1/status", "GET", 400, "model_required"),
            ("/v1/status?model=one", "GET", 501, "not_recorded"),
            ("/v1/status?model=nope", "GET", 404, "model_not_found"),
            ("/busy_threshold?model=one", "GET", 200, None),
            ("/v1/loras?model=one", "GET", 503, "no_owner"),
            ("/v1/status?model=one", "POST", 405, "method_not_allowed"),
            ("/v1/chat/completions", "GET", 405, "method_not_allowed"),
            ("/favicon.ico?model=one", "GET", 404, "not_found"),
        ):
            response = await client.request(method, path, headers=headers)
            found = response.json().get("error", {}).get("code")
            assert (path, response.status_code, found) == (path, status, code), response.text
        refused = await client.get("/busy_threshold?model=one")
        assert error(refused) == (401, "admin_token_missing")
    assert scene.loaded == []


async def test_an_alias_names_a_model_and_can_be_moved(scene: Scene) -> None:
    await scene.serve_all("one", "two")
    await scene.alias("prod", "one")
    assert await scene.models.find("prod", "r") == (await scene.find("one"), "one")
    cards = {card["id"]: card.get("root") for card in await scene.models.cards()}
    assert cards == {"one": None, "two": None, "prod": "one"}
    await scene.alias("prod", "two")
    assert await scene.find("prod") is await scene.find("two")
    await scene.alias("prod", "tow")
    says = "the alias 'prod' names an unknown model 'tow'; models are: one, two"
    await scene.fails("prod", 404, "model_not_found", says)
    await scene.alias("prod")
    await scene.fails("prod", 404, "model_not_found", "unknown model 'prod'")


async def test_a_removed_model_is_no_longer_served_until_it_is_placed_again(scene: Scene) -> None:
    digest = await scene.serve_all("one", "two")
    await scene.find("two")
    await scene.log.append([Draft(GROUPS.name, 0, b"", b"two")])
    await until(lambda: scene.models.names == ["one", "three"])
    await scene.fails("two", 404, "model_not_found")
    await scene.append(GROUPS, 0, GroupPlaced(group="two", partition=1))
    await until(lambda: "two" in scene.models.names)
    await scene.serve("two", digest)
    assert (await scene.find("two")).group.require_partition() == 1


async def test_the_requests_of_an_alias_are_divided_by_weight(scene: Scene) -> None:
    await scene.serve_all("one", "two")
    await scene.alias("prod", "one", "two", weight=3.0)
    ids = [f"request-{number}" for number in range(400)]
    chosen = await scene.chosen("prod", ids)
    assert chosen == await scene.chosen("prod", ids)
    assert 270 <= chosen.count("one") <= 330  # a function of the ids, so always the same number
    sent_again = await scene.chosen("prod", [http_request_id("mine", number) for number in range(20)])
    assert len(set(sent_again)) == 1, "only the part of the id that the client chose counts"
    await scene.serve("one", "", ready=0)
    assert set(await scene.chosen("prod", ids[:9])) == {"two"}


async def test_a_target_that_is_not_ready_moves_only_its_own_requests(scene: Scene) -> None:
    await scene.serve_all(*MODELS)
    await scene.alias("prod", *MODELS)
    ids = [f"request-{number}" for number in range(200)]
    before = await scene.chosen("prod", ids)
    await scene.serve("one", "", ready=0)
    after = await scene.chosen("prod", ids)
    assert {was for was, now in zip(before, after, strict=True) if was != now} == {"one"}


async def test_the_fallback_of_an_alias_serves_while_no_target_is_ready(scene: Scene) -> None:
    digest = await scene.serve_all("two")
    await scene.alias("prod", "one", fallback="two")
    assert await scene.chosen("prod", ["r"]) == ["two"]
    await scene.serve("one", digest)
    assert await scene.chosen("prod", ["r"]) == ["one"]
    await scene.alias("one", "two")
    assert await scene.chosen("one", ["r"]) == ["one"], "a model has precedence over an alias of its name"


def test_files_that_no_ingress_would_load_have_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_card(DEFAULT_MODEL)
    assert whole is not None
    total = sum(map(len, whole[1].values()))
    monkeypatch.setattr("forebay.ingress.model_cards.FILE_BYTES_MAX", total)
    assert read_card(DEFAULT_MODEL) == whole
    monkeypatch.setattr("forebay.ingress.model_cards.FILE_BYTES_MAX", total - 1)
    assert read_card(DEFAULT_MODEL) is None
