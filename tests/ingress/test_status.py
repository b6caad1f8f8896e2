"""`GET /v1/status`: its schema in /openapi.json, and one derivation for several calls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
from jsonschema import Draft202012Validator
from prometheus_client import CollectorRegistry

from forebay import runtime
from forebay.ingress.errors import ApiError
from forebay.ingress.http.app import build_app
from forebay.ingress.http.queries import SHARED_S, SharedReader, StatusReader
from forebay.ingress.served import OneModel
from forebay.replay.status import GroupStatus, owner_status
from tests.harness.fake_runtime import FakeRuntime
from tests.harness.memory_log import memory_log
from tests.ingress.conftest import Scene
from tests.system import MODEL, System, until


class Derivations:
    """Derives statuses that differ in their version, when the test lets it.

    Attributes:
        error: error of every derivation; None for a status.
    """

    def __init__(self, status: GroupStatus) -> None:
        self._status = status
        self.begun = 0
        self.may_end = asyncio.Event()
        self.error: ApiError | None = None

    async def derive(self) -> GroupStatus:
        self.begun += 1
        status = msgspec.structs.replace(self._status, version=self.begun)
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return status


async def real_status() -> GroupStatus:
    log, _ = memory_log()
    async with System(log).started(workers=1) as system, system.owned() as owner:
        await until(lambda: len(owner.world.fleet) == 1)
        status = await owner_status(log, 0, MODEL, owner.world)
    log.close()
    return status


@asynccontextmanager
async def client(scene: Scene, read: StatusReader) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(OneModel(scene.ingress), CollectorRegistry(), read_status=read)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as made:
        yield made


async def test_the_status_matches_its_documented_schema(scene: Scene) -> None:
    status = await real_status()

    async def read() -> GroupStatus:
        return status

    async with client(scene, read) as made:
        whole = (await made.get("/openapi.json")).json()
        found = (await made.get("/v1/status")).json()
    documented = whole["paths"]["/v1/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert documented == {"$ref": "#/components/schemas/GroupStatus"}
    schema = Draft202012Validator({**documented, "components": whole["components"]})
    schema.validate(found)
    assert [rank["rank"] for worker in found["workers"] for rank in worker["ranks"]] == [0]
    for part in (found, found["owner"], found["workers"][0]["ranks"][0]):
        name = next(iter(part))
        value = part.pop(name)
        assert not schema.is_valid(found), name
        part[name] = value


async def test_calls_share_a_derivation_and_its_result_for_a_second(scene: Scene) -> None:
    derivations = Derivations(await real_status())
    shared = SharedReader(derivations.derive)
    clock = FakeRuntime()
    with runtime.use(clock):
        async with client(scene, shared.read) as made:

            async def version() -> int:
                found: int = (await made.get("/v1/status")).raise_for_status().json()["version"]
                return found

            first, *others = (asyncio.create_task(version()) for _ in range(20))
            await until(lambda: derivations.begun)
            first.cancel()  # this client disconnects
            clock.monotonic_shift_s += 10 * SHARED_S  # a slow derivation is shared, too
            derivations.may_end.set()
            assert await asyncio.gather(*others) == [1] * 19
            clock.monotonic_shift_s -= 10 * SHARED_S  # so that the next call is early enough on a busy machine, too
            assert await version() == 1
            clock.monotonic_shift_s += 12 * SHARED_S
            assert await version() == 2
            assert derivations.begun == 2


async def test_an_error_is_not_shared_with_later_calls(scene: Scene) -> None:
    derivations = Derivations(await real_status())
    shared = SharedReader(derivations.derive)
    derivations.error = ApiError(503, "log_unavailable", "no broker")
    async with client(scene, shared.read) as made:
        pending = [asyncio.create_task(made.get("/v1/status")) for _ in range(2)]
        await until(lambda: derivations.begun)
        derivations.may_end.set()
        assert [response.status_code for response in await asyncio.gather(*pending)] == [503, 503]
        derivations.error = None
        assert (await made.get("/v1/status")).json()["version"] == 2
