"""Commands over HTTP: events on the log, responses, and the adapters served afterwards."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import httpx
import pytest

from forebay import runtime
from forebay.events.codec import encode
from forebay.events.control import Command, WorkerCommanded
from forebay.events.decisions import CommandOutcome
from forebay.events.fleet import WorkerJoined, WorkerLost, WorkerRecovered, WorkerSpec
from forebay.events.tokens import CommandResponse, ResponseError
from forebay.events.topics import CONTROL, FLEET
from forebay.ingress import adapters
from forebay.transport.base import Draft, LogError
from tests.harness.fake_runtime import FakeRuntime
from tests.ingress.conftest import ADMIN_TOKEN, NAME, SLOT, TEXT, Scene, error, make_scene, text
from tests.system import until


@pytest.fixture(scope="module")
def admin_token() -> str:
    return ADMIN_TOKEN


LORA = {"lora_name": "sql", "lora_path": "/adapters/sql"}
LOAD = Command(action="load_lora", lora_name="sql", lora_path="/adapters/sql")
UNLOAD = Command(action="unload_lora", lora_name="sql")


def outcome(worker_id: str = "w1", **changes: Any) -> CommandOutcome:
    return CommandOutcome(**{"worker_id": worker_id, "worker_epoch": 1, "pool": "default", "status": "done", **changes})


def late(worker_id: str) -> CommandOutcome:
    return outcome(worker_id, status="timed_out", message="late")


LEFT = outcome("a", status="left", message="gone")


async def next_command(scene: Scene, count: int = 1) -> WorkerCommanded:
    await until(lambda: len(scene.events(CONTROL, WorkerCommanded)) >= count)
    found: WorkerCommanded = scene.events(CONTROL, WorkerCommanded)[count - 1]
    return found


async def answered(
    scene: Scene, call: Awaitable[httpx.Response], *outcomes: CommandOutcome, count: int = 1, error: Any = None
) -> tuple[httpx.Response, WorkerCommanded]:
    """Send a command, and respond as the router."""
    pending = asyncio.ensure_future(call)
    command = await next_command(scene, count)
    scene.send(CommandResponse(command_id=command.command_id, owner_epoch=1, outcomes=outcomes, error=error))
    return await pending, command


@pytest.mark.parametrize(
    ("method", "path", "body", "command"),
    [
        ("POST", "/v1/loras", LORA, LOAD),
        (
            "POST",
            "/v1/loras",
            {"lora_name": "sql", "source": {"uri": "s3://team/sql"}, "lora_digest": "a" * 64},
            Command(action="load_lora", lora_name="sql", lora_path="s3://team/sql", lora_digest="a" * 64),
        ),
        (
            "POST",
            "/v1/loras",
            {**LORA, "placement": "auto"},
            Command(action="load_lora", lora_name="sql", lora_path="/adapters/sql", placement="auto"),
        ),
        ("POST", "/v1/load_lora_adapter", {**LORA, "load_inplace": False}, LOAD),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "sql", "lora_int_id": 3}, UNLOAD),
        ("DELETE", "/v1/loras/team/sql", None, Command(action="unload_lora", lora_name="team/sql")),
        ("GET", "/v1/loras", None, Command(action="list_loras")),
        ("POST", "/clear_kv_blocks", None, Command(action="clear_kv_blocks")),
        ("POST", "/reset_prefix_cache", None, Command(action="clear_kv_blocks")),
        ("POST", "/sleep", {"level": 2}, Command(action="sleep", level=2)),
        ("POST", "/sleep?level=2", None, Command(action="sleep", level=2)),
        ("POST", "/wake_up", {}, Command(action="wake_up")),
        ("POST", "/pause", None, Command(action="pause")),
        ("POST", "/resume", None, Command(action="resume")),
        ("POST", "/v1/commands", {"action": "sleep", "level": 2}, Command(action="sleep", level=2)),
        ("POST", "/v1/commands", {"action": "unload_lora", "lora_name": "sql"}, UNLOAD),
    ],
    ids=str,
)
async def test_every_route_sends_its_command(scene: Scene, method: str, path: str, body: Any, command: Command) -> None:
    call = scene.client.request(method, path, json=body) if body is not None else scene.client.request(method, path)
    response, event = await answered(scene, call, outcome(loras=("sql",)))
    assert event.command == command
    assert (event.model, event.pool, event.worker_ids, event.reply_slot) == (NAME, "", (), SLOT)
    assert event.timeout_us == 60_000_000
    reply = response.json()
    assert response.status_code == 200, reply
    assert reply.pop("placed", []) == []
    loras = reply.pop("loras", None)
    assert loras == ({"sql": ["w1"]} if command.action == "list_loras" else None)
    assert reply == {
        "command_id": event.command_id,
        "action": command.action,
        "outcomes": [{"worker_id": "w1", "pool": "default", "status": "done", "loras": ["sql"], "message": None}],
    }
    assert response.headers["x-request-id"] == event.command_id
    assert scene.metric('dynamo_frontend_requests_total{endpoint="command",model="test-model"')


async def test_a_drain_names_workers_or_a_pool(scene: Scene) -> None:
    path, action = "/v1/commands", {"action": "drain"}
    refused = await scene.client.post(path, json=action)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "worker_ids")
    message = "it was the last ready worker of its pool; new requests need another worker"
    call = scene.client.post(path, json={**action, "operator": "alice", "worker_ids": ["w1"]})
    response, event = await answered(scene, call, outcome(message=message))
    assert (event.command, event.worker_ids, event.operator) == (Command(action="drain"), ("w1",), "alice")
    assert (response.status_code, response.json()["outcomes"][0]["message"]) == (200, message)
    _, event = await answered(scene, scene.client.post(path, json={**action, "pool": "p"}), outcome(), count=2)
    assert (event.pool, event.operator) == ("p", "")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause", {"worker_ids": ["a", "b"], "pool": "p", "timeout_s": 2.5}),
        ("/pause?worker_id=a&worker_id=b&pool=p&timeout_s=2.5", None),
        ("/pause?worker_id=x&pool=p", {"worker_ids": ["a", "b"], "timeout_s": 2.5}),
    ],
)
async def test_workers_and_timeout_of_a_command(scene: Scene, path: str, body: Any) -> None:
    headers = {"x-request-id": "mine"}
    _, event = await answered(scene, scene.client.post(path, json=body, headers=headers), outcome("a"))
    assert (event.command_id, event.worker_ids, event.pool) == ("mine", ("a", "b"), "p")
    assert event.timeout_us == 2_500_000


@pytest.mark.parametrize(
    ("outcomes", "status", "code", "message"),
    [
        (
            [outcome("a"), outcome("b", status="refused", message="no room")],
            409,
            "command_refused",
            "1 of 2 workers did not pause: b: no room",
        ),
        (
            [LEFT, outcome("b", status="refused", message="no")],
            502,
            "worker_left",
            "2 of 2 workers did not pause: a: gone; b: no",
        ),
        (
            [late(name) for name in "abcd"],
            504,
            "command_timed_out",
            "4 of 4 workers did not pause: a: late; b: late; c: late; …",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_failed_outcomes_set_the_status(
    scene: Scene, outcomes: list[CommandOutcome], status: int, code: str, message: str
) -> None:
    response, _ = await answered(scene, scene.client.post("/pause"), *outcomes)
    assert error(response) == (status, code)
    assert response.json()["error"]["message"] == message
    found = [(one["worker_id"], one["status"], one["message"] or "") for one in response.json()["outcomes"]]
    assert found == [(one.worker_id, one.status, one.message) for one in outcomes]
    assert scene.metric(f'forebay_ingress_refused_total{{code="{code}"}} 1.0')


async def test_an_error_of_the_router_is_returned(scene: Scene) -> None:
    unknown = ResponseError(status=404, code="unknown_worker", message="unknown worker x")
    response, _ = await answered(scene, scene.client.post("/pause"), error=unknown)
    assert error(response) == (404, "unknown_worker")


async def test_a_command_without_a_router_times_out(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.ingress.commands.GRACE_S", 0.0)
    assert error(await scene.client.post("/pause", json={"timeout_s": 0.01})) == (504, "deadline_exceeded")
    assert len(scene.group.replies) == 0


async def test_a_command_id_is_unique_in_flight(scene: Scene) -> None:
    first = scene.start("/pause", {}, **{"x-request-id": "mine"})
    await next_command(scene)
    second = await scene.client.post("/pause", headers={"x-request-id": "mine"})
    assert error(second) == (409, "duplicate_command_id")
    for owner in (1, 2):
        scene.send(CommandResponse(command_id="mine", owner_epoch=owner, outcomes=(outcome(),)))
    assert (await first).status_code == 200


async def fail(*_: Any) -> Any:
    raise LogError("no broker")


async def test_a_failed_log_is_a_503(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = scene.start("/pause", {})
    await next_command(scene)
    scene.group.replies.interrupt_all("the disk is full")
    monkeypatch.setattr(scene.log, "append", fail)
    for response, reason in ((await waiting, "the disk is full"), (await scene.client.post("/pause"), "no broker")):
        assert (response.status_code, response.json()["error"]["message"]) == (503, reason)


async def test_adapters_accept_every_valid_model_name(scene: Scene) -> None:
    for count, name in enumerate(("org/sql:v2", "meta-llama/Llama-3.1-8B-sql"), 1):
        call = scene.client.post("/v1/loras", json={**LORA, "lora_name": name})
        response, command = await answered(scene, call, outcome(), count=count)
        assert (response.status_code, command.command.lora_name) == (200, name)


class Workers:
    """Plays a router whose workers have loaded the given adapters, and responds to `list_loras`."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.loras: dict[str, tuple[str, ...]] = {"w1": ()}
        self.late: set[str] = set()
        self.error: ResponseError | None = None
        self.placed: tuple[str, ...] = ()
        self.listed = 0

    def commanded(self, action: Any, name: str = "sql") -> None:
        """Append a command of another ingress."""
        command, command_id = Command(action=action, lora_name=name), f"{action}-{name}"
        self.scene.control(
            WorkerCommanded(command_id=command_id, model=NAME, command=command, reply_slot=9, timeout_us=1)
        )

    def joined(self, worker_id: str, *loras: str) -> None:
        sizes: dict[str, Any] = {"block_size": 4, "kv_blocks_total": 9, "max_num_seqs": 9, "max_num_batched_tokens": 9}
        spec = WorkerSpec(worker_id=worker_id, model=NAME, loras=loras, **sizes)
        self.fleet(WorkerJoined(owner_epoch=1, spec=spec, lease="l", slot=0, from_offset=0))

    def fleet(self, event: WorkerJoined | WorkerLost | WorkerRecovered) -> None:
        self.scene.log.append_soon([Draft(FLEET.name, 0, encode(FLEET, event))])

    async def run(self) -> None:
        for count in itertools.count(1):
            event = await next_command(self.scene, count)
            if event.reply_slot != SLOT or event.command.action != "list_loras":
                continue
            self.listed += 1
            outcomes = tuple(
                late(name) if name in self.late else outcome(name, loras=loras) for name, loras in self.loras.items()
            )
            reported = CommandResponse(
                command_id=event.command_id, owner_epoch=1, outcomes=outcomes, error=self.error, placed=self.placed
            )
            self.scene.send(reported)

    async def served(self) -> list[str]:
        """Return the names of the served models after that of the scene."""
        return await served(self.scene)

    async def served_later(self) -> list[str]:
        """List the models after the pause between two lists."""
        with runtime.use(FakeRuntime(monotonic_shift_s=2 * adapters.RETRY_S)):
            return await self.served()


async def served(scene: Scene) -> list[str]:
    response = await scene.client.get("/v1/models")
    assert response.status_code == 200, response.text
    first, *others = (card["id"] for card in response.json()["data"])
    assert first == NAME
    return others


@pytest.fixture
async def workers(scene: Scene) -> AsyncIterator[Workers]:
    made = Workers(scene)
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_adapter_loaded_through_another_ingress_is_served_as_a_model(workers: Workers, scene: Scene) -> None:
    assert await workers.served() == []
    assert error(await scene.client.get("/v1/models/sql")) == (404, "model_not_found")
    assert workers.listed == 0, "nobody ever loaded one"
    workers.loras = {"w1": ("sql", "legal"), "w2": (NAME,)}
    workers.commanded("load_lora")
    assert await workers.served() == ["legal", "sql"]
    card = (await scene.client.get("/v1/models/sql")).json()
    assert (card["id"], card["parent"]) == ("sql", NAME)
    pending = scene.start(TEXT, text(model="sql"))
    request = await scene.next_request()
    assert request.lora_name == "sql"
    scene.end(request.request_id)
    assert (await pending).status_code == 200
    assert workers.listed == 1, "nothing changed since"
    workers.loras = {"w1": ()}
    workers.commanded("unload_lora")
    assert error(await scene.client.post(TEXT, json=text(model="sql"))) == (404, "model_not_found")
    assert workers.listed == 2


async def test_adapter_of_the_catalog_is_served_before_a_worker_has_it(workers: Workers, scene: Scene) -> None:
    workers.loras, workers.placed = {"w1": ("legal",)}, ("sql", "legal")
    workers.commanded("load_lora")
    assert await workers.served() == ["legal", "sql"]
    assert (await scene.client.get("/v1/loras")).json()["placed"] == ["sql", "legal"]


async def test_adapters_follow_joining_and_leaving_workers(workers: Workers) -> None:
    workers.fleet(WorkerLost(owner_epoch=1, worker_id="w0", worker_epoch=0))
    workers.joined("w1")
    assert await workers.served() == []
    assert workers.listed == 0
    workers.loras = {"w1": (), "w2": ("sql",)}
    workers.joined("w2", "sql")
    assert await workers.served() == ["sql"]
    workers.loras = {"w1": ()}
    workers.fleet(WorkerLost(owner_epoch=1, worker_id="w2", worker_epoch=2))
    assert await workers.served() == []


async def test_adapters_of_a_suspect_worker_return_after_its_recovery(workers: Workers) -> None:
    recovered = WorkerRecovered(owner_epoch=1, worker_id="w2", worker_epoch=2)
    workers.fleet(recovered)
    assert await workers.served() == []
    assert workers.listed == 0, "nobody ever had one"
    workers.loras = {"w1": ("math",)}  # the owner asks only those that are ready
    workers.commanded("load_lora")
    assert await workers.served() == ["math"]
    workers.loras["w2"] = ("sql",)
    workers.fleet(recovered)
    assert await workers.served() == ["math", "sql"]


async def test_adapters_of_a_late_worker_stay_and_are_requested_again(workers: Workers) -> None:
    workers.loras, workers.late = {"w1": ("sql",), "w2": ("math",)}, {"w2"}
    workers.commanded("load_lora")
    assert await workers.served() == ["sql"]
    workers.late = set()
    assert await workers.served() == ["sql"], "not at once"
    assert await workers.served_later() == ["math", "sql"]
    assert workers.listed == 2
    workers.loras["w1"], workers.late = (), {"w2"}
    workers.commanded("unload_lora", "sql")
    assert "math" in await workers.served()
    workers.late = set()
    assert await workers.served_later() == ["math"]


async def test_adapters_are_listed_if_retention_removed_records(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.loras = {"w1": ("sql",)}
    for number in range(2):
        workers.joined(f"w{number}")
    begin = workers.scene.log.begin

    async def later(topic: str, partition: int) -> int:
        return 1 if topic == FLEET.name else await begin(topic, partition)

    monkeypatch.setattr(workers.scene.log, "begin", later)
    assert await workers.served() == ["sql"]


async def test_a_log_that_fails_at_first_is_read_completely_later(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(workers.scene.log, "begin", fail)
        assert (await workers.scene.client.get("/v1/models")).status_code == 503
    workers.loras = {"w1": ("sql",)}
    workers.joined("w1", "sql")
    assert await workers.served() == ["sql"]


async def test_the_last_list_stays_while_there_are_no_workers(workers: Workers) -> None:
    workers.error = ResponseError(status=503, code="no_workers", message="no worker is ready")
    workers.commanded("load_lora")
    assert await workers.served() == []
    workers.error, workers.loras = None, {"w1": ("sql",)}
    assert await workers.served() == []
    assert await workers.served_later() == ["sql"]


async def test_undecodable_records_are_ignored(workers: Workers) -> None:
    workers.scene.log.append_soon([Draft(CONTROL.name, 0, b"{"), Draft(FLEET.name, 0, b"{")])
    assert await workers.served() == []
    workers.commanded("sleep")
    assert await workers.served() == []
    assert workers.listed == 0


async def test_a_log_that_does_not_respond_is_a_503(
    workers: Workers, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    workers.commanded("load_lora")
    monkeypatch.setattr(adapters, "CATCH_UP_S", 0.01)
    for end in (fail, never):
        monkeypatch.setattr(scene.log, "end", end)
        assert (await scene.client.get("/v1/models")).status_code == 503


async def test_before_a_router_has_placed_the_model_only_configured_adapters_are_served() -> None:
    async with make_scene(admin_token=ADMIN_TOKEN, loras=("legal",), is_placed=False) as scene:
        assert await served(scene) == ["legal"]
        assert error(await scene.client.post("/pause")) == (503, "no_group")
