"""The HTTP API of the indexer, over a replica of a small system."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay.core.block_hashes import block_hashes, extend_chain
from forebay.core.routing.policies import BUILT_IN
from forebay.core.state.prefix_index import PrefixIndex
from forebay.events.base import pack_u32
from forebay.events.codec import encode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.decisions import RequestRouted
from forebay.events.groups import GroupPlaced
from forebay.events.kv import BlocksStored
from forebay.events.topics import DECISIONS, GROUPS
from forebay.indexer.app import build_indexer_app
from forebay.indexer.prompts import Tokenizers
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.model_cards import read_card
from forebay.live.indexer import delivered_log, replica
from forebay.live.indexer.indexer import Indexer
from forebay.live.owner.owner import Owner
from forebay.transport.base import Draft
from forebay.transport.directory import Directory
from forebay.transport.models import ModelStore, stored_card
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import background
from tests.system import BLOCK, MODEL, System, take_snapshot, until

CUSTOM = "mine.Policy"
PROMPT = list(range(5 * BLOCK))
TEXT = "the log is the truth, and every decision on it can be derived again"


def hashes_of(prompt: list[int]) -> list[int]:
    return extend_chain(None, block_hashes(pack_u32(prompt), BLOCK))


@dataclass
class Scene:
    system: System
    owner: Owner
    indexer: Indexer
    client: httpx.AsyncClient

    @property
    def replica(self) -> replica.Replica:
        found = self.indexer.find(MODEL)
        assert found is not None
        return found

    async def current(self) -> None:
        """Let the replica read the journal up to an end after all earlier events."""
        await take_snapshot(self.owner)
        await until(lambda: self.replica.problem is None and self.replica.position().journal_offset == self.end)

    @property
    def end(self) -> int:
        return self.system.log.next_offset(DECISIONS.name, 0)

    async def post(self, path: str, code: int = 200, **body: Any) -> Any:
        response = await self.client.post(f"/groups/{path}", json=body)
        assert response.status_code == code, response.text
        return response.json()

    async def get(self, path: str, code: int = 200) -> Any:
        response = await self.client.get(path)
        assert response.status_code == code, response.text
        return response.json()


@asynccontextmanager
async def serving(log: SqliteLog, tmp_path: Path, card: str, **owner_settings: Any) -> AsyncIterator[Scene]:
    """Run an owner with two workers, and an indexer that has its group."""
    for name, partition in ((MODEL, 0), ("other", 1), ("lost", 2)):
        value = encode(GROUPS, GroupPlaced(group=name, partition=partition))
        await log.append([Draft(GROUPS.name, 0, value, name.encode())])
    indexer, directory, store = Indexer(CollectorRegistry()), Directory(log), ModelStore(log)
    await directory.start()
    await store.start()
    app = build_indexer_app(indexer, Tokenizers(store, tmp_path), frozenset({"indexer"}))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        System(log).started(workers=2, card=card) as system,
        system.owned(fleet=2, **owner_settings) as owner,
        httpx.AsyncClient(transport=transport, base_url="http://indexer") as client,
        background(indexer.run(log, directory)),
    ):
        yield Scene(system, owner, indexer, client)
    store.close()
    directory.close()


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """Yield an indexer that is assigned the group, whose workers have a model card."""
    monkeypatch.setattr(delivered_log, "QUIET_S", 0.001)
    log = SqliteLog.open(None)
    found = read_card(DEFAULT_MODEL)
    assert found is not None
    async with serving(log, tmp_path, await stored_card(log, MODEL, *found)) as scene:
        scene.indexer.assign({0}, {1: "http://there:8200"})
        await until(lambda: scene.indexer.replicas)
        await scene.current()
        yield scene
    log.close()


async def test_overlaps_are_those_of_the_index_for_each_form_of_a_prompt(scene: Scene) -> None:
    text_ids = Model(DEFAULT_MODEL).encode(TEXT, special=True)
    await scene.system.serve("a", PROMPT)
    await scene.system.serve("b", text_ids)
    await until(lambda: len({*scene.owner.world.index.overlaps(hashes_of(PROMPT))}) == 1)
    await scene.current()
    found = await scene.post(f"{MODEL}/overlaps", token_ids=[*PROMPT, 99])
    (routed, *_) = scene.system.decisions(RequestRouted)
    (rank,) = found["ranks"]
    assert rank == {"worker_id": routed.worker_id, "rank": 0, "device": 5, "host": 0, "disk": 0, "store": 0}
    assert (found["blocks"], found["block_size"]) == (5, BLOCK)
    assert found["position"]["journal_offset"] == scene.end
    assert found["position"]["lag_records"] == found["position"]["lag_s"] == 0
    assert found["position"]["proven_at"] is not None
    blocks = block_hashes(pack_u32(PROMPT), BLOCK)
    assert (await scene.post(f"{MODEL}/overlaps", block_hashes=blocks))["ranks"] == found["ranks"]
    by_text = await scene.post(f"{MODEL}/overlaps", text=TEXT)
    by_ids = await scene.post(f"{MODEL}/overlaps", token_ids=text_ids)
    assert by_text["ranks"] == by_ids["ranks"] != []
    others: tuple[dict[str, Any], ...] = ({"lora_name": "x"}, {"cache_salt": "x"})
    for other in others:
        assert (await scene.post(f"{MODEL}/overlaps", token_ids=PROMPT, **other))["ranks"] == []


async def test_a_selection_is_the_next_decision_and_changes_nothing(scene: Scene) -> None:
    await scene.system.serve("a", PROMPT)
    await scene.current()
    before = scene.replica.world.digest(), scene.replica.world.seq, list(scene.replica.world.consumed)
    selected = await scene.post(f"{MODEL}/select", token_ids=[*PROMPT, 7, 7, 7, 7])
    load = await scene.get(f"/groups/{MODEL}/load")
    await scene.get("/groups")
    assert (scene.replica.world.digest(), scene.replica.world.seq, list(scene.replica.world.consumed)) == before
    assert [(rank["worker_id"], rank["active_requests"]) for rank in load["ranks"]] == [("w0", 0), ("w1", 0)]
    assert max(rank["blocks"]["device"] for rank in load["ranks"]) >= 5
    assert load["queued"] == {"default": 0}
    await scene.system.serve("b", [*PROMPT, 7, 7, 7, 7])
    *_, routed = scene.system.decisions(RequestRouted)
    assert (selected["worker_id"], selected["pool"], selected["overlap_blocks"]) == (routed.worker_id, routed.pool, 5)
    assert sorted(one["worker_id"] for one in selected["candidates"]) == ["w0", "w1"]
    assert min(one["cost"] for one in selected["candidates"]) == routed.terms.cost
    assert (selected["reason"], selected["would_wait"]) == (None, False)
    await scene.current()  # the journal is derived on


async def test_a_selection_by_a_policy_that_the_indexer_lacks_names_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index and the load need no policy. The first decision by this policy ends the replica's current state."""
    monkeypatch.setattr(delivered_log, "QUIET_S", 0.001)
    log = SqliteLog.open(None)
    pool = PoolConfigured(pool="default", model=MODEL, block_size=BLOCK, router=RouterConfig(mode=CUSTOM))
    async with serving(log, tmp_path, "", pool=pool, policies={CUSTOM: BUILT_IN["kv"]}) as scene:
        scene.indexer.assign({0}, {})
        await until(lambda: scene.indexer.replicas)
        await scene.current()
        refused = await scene.post(f"{MODEL}/select", 503, token_ids=PROMPT)
        assert refused["error"]["code"] == "policy_missing"
        assert f"pass --allow-policy {CUSTOM}" in refused["error"]["message"]
        assert (await scene.post(f"{MODEL}/overlaps", token_ids=PROMPT))["ranks"] == []
        await scene.system.serve("a", PROMPT)
        await until(lambda: f"pass --allow-policy {CUSTOM}" in str(scene.replica.problem))
    log.close()


async def test_a_dump_restores_the_index(scene: Scene) -> None:
    await scene.system.serve("a", PROMPT)
    await scene.system.serve("b", PROMPT[::-1])
    await scene.current()
    response = await scene.client.get(f"/groups/{MODEL}/index")
    assert json.loads(response.headers["x-forebay-position"])["journal_offset"] == scene.end
    restored, held = PrefixIndex(), scene.replica.world.index
    for cursor in held.cursors():
        restored.add_holder(cursor.worker_id, cursor.rank, cursor.worker_epoch)
    lines = response.text.splitlines()
    for line in lines:
        restored.apply(msgspec.json.decode(line, type=BlocksStored))
    for prompt in (PROMPT, PROMPT[::-1]):
        hashes = hashes_of(prompt)
        assert restored.overlaps(hashes) == held.overlaps(hashes) != {}
    one = await scene.client.get(f"/groups/{MODEL}/index", params={"worker": "w0"})
    assert one.text.splitlines() == [line for line in lines if '"w0"' in line]


async def test_groups_of_other_instances_and_unknown_ones_are_named(scene: Scene) -> None:
    groups = {one["model"]: one for one in (await scene.get("/groups"))["groups"]}
    assert {name: one["state"] for name, one in groups.items()} == {
        "lost": "elsewhere",
        MODEL: "following",
        "other": "elsewhere",
    }
    assert (groups["other"]["address"], groups["other"]["position"]) == ("http://there:8200", None)
    assert groups[MODEL]["position"]["journal_offset"] > 0
    for path in ("load", "index"):
        assert "http://there:8200" in (await scene.get(f"/groups/other/{path}", 421))["error"]["message"]
        assert (await scene.get(f"/groups/lost/{path}", 503))["error"]["code"] == "not_assigned"
        assert "models are: lost" in (await scene.get(f"/groups/none/{path}", 404))["error"]["message"]
    for path in ("overlaps", "select"):
        assert (await scene.post(f"other/{path}", 421, token_ids=[1]))["error"]["code"] == "other_instance"


async def test_a_group_without_a_current_state_responds_with_the_reason(scene: Scene) -> None:
    scene.replica.problem = "retention removed its beginning"
    for path in (f"/groups/{MODEL}/load", f"/groups/{MODEL}/index", "/ready"):
        assert "retention removed its beginning" in (await scene.get(path, 503))["error"]["message"]
    (group,) = [one for one in (await scene.get("/groups"))["groups"] if one["model"] == MODEL]
    assert (group["state"], group["problem"]) == ("restoring", "retention removed its beginning")


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({}, 400, "got no prompt; give one of text, token_ids, block_hashes"),
        ({"text": "a", "token_ids": [1]}, 400, "got text and token_ids"),
        ({"token_ids": []}, 400, "token_ids"),
        ({"token_ids": [-1]}, 400, "token_ids"),
        ({"block_hashes": [1 << 64]}, 400, "block_hashes"),
        ({"prompt": "a"}, 400, "prompt"),
        ({"text": "word " * 200_000}, 400, "context"),
    ],
)
async def test_an_invalid_prompt_is_rejected(scene: Scene, body: dict[str, Any], code: int, message: str) -> None:
    assert message in (await scene.post(f"{MODEL}/overlaps", code, **body))["error"]["message"]


async def test_a_large_body_and_a_foreign_page_are_rejected(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.indexer.app.BODY_BYTES_MAX", 100)
    await scene.post(f"{MODEL}/overlaps", 413, token_ids=[1] * 100)
    page = await scene.client.get("/groups", headers={"host": "evil.example"})
    assert page.status_code == 403


async def test_a_text_without_a_usable_card_is_rejected(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.indexer.app.card_of", lambda _: "")
    refused = await scene.post(f"{MODEL}/overlaps", 422, text="a")
    assert "have stored no model card, so text cannot be tokenized; send token_ids" in refused["error"]["message"]
    assert (await scene.post(f"{MODEL}/overlaps", token_ids=PROMPT))["ranks"] == []


async def test_probes_metrics_and_the_description(scene: Scene) -> None:
    assert (await scene.get("/live"), await scene.get("/ready")) == ({"status": "live"}, {"status": "ready"})
    metrics = (await scene.client.get("/metrics")).text
    assert f'forebay_indexer_following{{group="{MODEL}"}} 1.0' in metrics
    described = await scene.get("/openapi.json")
    operations = described["paths"]["/groups/{model}/overlaps"]["post"]
    assert {"200", "400", "404", "413", "421", "422", "503"} <= operations["responses"].keys()
    assert "422" not in described["paths"]["/groups/{model}/index"]["get"]["responses"]
    assert {"PromptBody", "Overlaps", "Position", "Loads"} <= described["components"]["schemas"].keys()
