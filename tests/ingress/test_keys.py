"""API keys of tenants: who a request is from, which requests are rejected, revocation, and files of keys."""

import asyncio
import gc
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from forebay import runtime
from forebay.events.codec import encode
from forebay.events.keys import KeySet
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import KEYS
from forebay.ingress.front import Front
from forebay.ingress.http.app import build_app
from forebay.ingress.http.guards import ApiKeyGuard
from forebay.ingress.key_file import read_keys
from forebay.ingress.metrics import IngressMetrics
from forebay.replay.status import GroupStatus, TenantStatus, read_status
from forebay.runtime.errors import ConfigError
from tests.harness.fake_runtime import FakeRuntime
from tests.harness.memory_log import memory_log
from tests.harness.only_model import OnlyModel
from tests.ingress.conftest import (
    ADMIN_TOKEN,
    CHAT,
    COUNT_TOKENS,
    MESSAGES,
    NAME,
    RESPONSES,
    ROUTE,
    TEXT,
    Scene,
    chat,
    client_of,
    error,
    text,
)
from tests.ingress.keyed import bearer, key_of, keyed
from tests.live.shared import background
from tests.system import until

MODELS = "/v1/models"


async def code_of(client: httpx.AsyncClient, headers: dict[str, str], path: str = MODELS) -> tuple[int, str]:
    response = await client.get(path, headers=headers)
    return error(response) if response.is_error else (response.status_code, "")


async def test_a_key_names_the_tenant_on_the_log() -> None:
    async with keyed(key_of("acme", weight=3, queue_classes=("batch",))) as (scene, _):
        claims = {"x-tenant": "beta", "tenant": "beta", "x-forebay-tenant": "beta"}
        for headers in (bearer("acme"), {"x-api-key": "fb-acme"}, {}):
            pending = scene.start(TEXT, text(), **headers, **claims)
            request = await scene.next_request()
            scene.reply(request.request_id, "the river")
            assert (await pending).status_code == 200
        first, second, anonymous = scene.requests(RequestSubmitted)
        for request in (first, second):
            assert (request.tenant, request.key_id, request.weight) == ("acme", key_of("acme").key_id, 3)
            assert (request.cache_namespace, request.routing.policy_class) == ("tenant/acme", "batch")
        assert (anonymous.tenant, anonymous.key_id, anonymous.cache_namespace) == ("", "", "")


@pytest.mark.parametrize("is_required", [False, True])
async def test_a_key_that_is_unknown_revoked_or_expired_is_rejected(*, is_required: bool) -> None:
    keys = key_of("valid"), key_of("revoked", revoked_us=1), key_of("expired", expires_us=1)
    async with keyed(*keys, require_key=is_required) as (scene, _):
        assert await code_of(scene.client, {}) == ((401, "invalid_api_key") if is_required else (200, ""))
        proxied = {"authorization": "Basic of-a-proxy"}
        assert await code_of(scene.client, proxied) == ((401, "invalid_api_key") if is_required else (200, ""))
        assert await code_of(scene.client, bearer("valid")) == (200, "")
        assert await code_of(scene.client, {**proxied, "x-api-key": "fb-valid"}) == (200, "")
        assert await code_of(scene.client, bearer("other")) == (401, "invalid_api_key")
        assert await code_of(scene.client, {"authorization": "Bearer"}) == (401, "invalid_api_key")
        assert await code_of(scene.client, bearer("revoked")) == (401, "api_key_revoked")
        assert await code_of(scene.client, bearer("expired")) == (401, "api_key_expired")
        assert (await scene.client.get("/health", headers=bearer("other"))).status_code == 200


async def test_without_keys_of_tenants_any_key_is_ignored_unless_one_is_required() -> None:
    async with keyed() as (scene, book):
        assert await code_of(scene.client, bearer("any")) == (200, "")
        await book.set(key_of("acme", revoked_us=1))
        await until(lambda: scene.front.keys.in_use)
        assert await code_of(scene.client, bearer("any")) == (401, "invalid_api_key"), "the revoked key still counts"
    async with keyed(require_key=True) as (scene, _):
        assert await code_of(scene.client, bearer("any")) == (401, "invalid_api_key")
    async with keyed(key_of("acme"), api_keys=("plain",)) as (scene, _):
        assert await code_of(scene.client, {}) == (401, "invalid_api_key")
        for key in ("plain", "fb-acme"):
            assert await code_of(scene.client, {"x-api-key": key}) == (200, "")


async def test_a_key_expires_by_the_clock_of_the_ingress() -> None:
    async with keyed(key_of("acme", expires_us=runtime.wall_us() + 3_600_000_000)) as (scene, _):
        for shift_s, expected in ((0, 200), (7_200, 401), (-7_200, 200)):
            with runtime.use(FakeRuntime(wall_shift_s=shift_s)):
                assert (await code_of(scene.client, bearer("acme")))[0] == expected


async def test_every_ingress_rejects_a_revoked_key_and_completes_its_requests() -> None:
    async with keyed(key_of("acme")) as (scene, book):
        front = Front(scene.log, scene.front.settings, IngressMetrics(CollectorRegistry(), NAME), 0, scene.model)
        await front.keys.start()
        other = client_of(build_app(OnlyModel(front, scene.model).models, CollectorRegistry()))
        async with background(front.keys.run()), other:
            for client in (scene.client, other):
                assert await code_of(client, bearer("acme")) == (200, "")
            pending = scene.start(TEXT, text(stream=True), **bearer("acme"))
            request = await scene.next_request()
            revoked = replace(key_of("acme"), revoked_us=runtime.wall_us())
            await book.set(revoked)
            await until(lambda: all(one.keys.find(b"fb-acme") == revoked for one in (scene.front, front)))
            for client in (scene.client, other):
                assert await code_of(client, bearer("acme")) == (401, "api_key_revoked")
            scene.reply(request.request_id, "the river")
            response = await pending
            assert (response.status_code, "[DONE]" in response.text) == (200, True)
            assert error(await scene.client.post(TEXT, json=text(), headers=bearer("acme"))) == (401, "api_key_revoked")


async def test_many_wrong_keys_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    async with keyed(key_of("acme")) as (scene, _):
        reached: list[Any] = []

        async def app(*arguments: Any) -> None:
            reached.append(arguments)

        async def sent(_: Any) -> None: ...

        guard = ApiKeyGuard(app, scene.front.keys, scene.front.metrics.reject)

        async def attempt(first: int, count: int) -> None:
            for number in range(first, first + count):
                headers = [(b"authorization", b"Bearer fb-%d" % number)]
                await guard({"type": "http", "path": TEXT, "headers": headers}, sent, sent)  # type: ignore[arg-type]

        await attempt(0, 100)
        gc.collect()
        before = len(gc.get_objects())
        await attempt(100, 10_000)
        gc.collect()
        assert len(gc.get_objects()) < before + 1_000
        assert scene.refusals() == {"invalid_api_key": 10_100}
        assert (reached, caplog.text) == ([], "")


async def test_a_key_is_limited_to_its_models() -> None:
    async with keyed(key_of("acme", models=("other", "its-adapter")), key_of("beta", models=(NAME,))) as (scene, _):
        bodies = {
            CHAT: chat(),
            TEXT: text(),
            RESPONSES: {"model": NAME, "input": "a"},
            MESSAGES: chat(),
            ROUTE: text(),
            "/v1/embeddings": {"model": NAME, "input": "a"},
            COUNT_TOKENS: {"model": NAME, "messages": chat()["messages"]},
            "/tokenize": {"prompt": "a"},
            "/detokenize": {"tokens": [1]},
        }
        for path, body in bodies.items():
            response = await scene.client.post(path, json=body, headers=bearer("acme"))
            assert error(response) == (404, "model_not_found"), path
            assert "models are: other, its-adapter; the API key permits no others" in response.text
        assert not scene.requests()
        for name, listed in (("acme", []), ("beta", [NAME])):
            models = (await scene.client.get(MODELS, headers=bearer(name))).json()["data"]
            assert [model["id"] for model in models] == listed
        assert await code_of(scene.client, bearer("acme"), f"{MODELS}/{NAME}") == (404, "model_not_found")
        assert await code_of(scene.client, bearer("beta"), f"{MODELS}/{NAME}") == (200, "")
        for path in ("/tokenize", "/detokenize"):
            assert (await scene.client.post(path, json=bodies[path], headers=bearer("beta"))).status_code == 200


# --- answers, users and traces ----------------------------------------------------------------------------------------


async def finished(scene: Scene, path: str, body: Any, **headers: str) -> httpx.Response:
    """Return the complete response to a request."""
    pending = scene.start(path, body, **headers)
    request = await scene.next_request()
    scene.reply(request.request_id, "the river")
    response = await pending
    assert response.status_code == 200, response.text
    return response


async def test_an_answer_of_another_tenant_is_unknown() -> None:
    async with keyed(key_of("acme"), key_of("beta"), key_of("acme-2", tenant="acme")) as (scene, _):
        kept = {"forebay": {"detach": True}}
        text_id = (await finished(scene, TEXT, text(**kept), **bearer("acme"), **{"x-request-id": "order-7"})).json()
        response_id = (await finished(scene, RESPONSES, {"model": NAME, "input": "a"}, **bearer("acme"))).json()["id"]
        answers, responses = f"/v1/requests/{text_id['id']}", f"{RESPONSES}/{response_id}"
        routes = [
            ("GET", answers),
            ("GET", f"{answers}/stream"),
            ("GET", f"{answers}/explain"),
            ("POST", f"{answers}/cancel"),
            ("DELETE", answers),
            ("GET", "/v1/requests/order-7"),
            ("DELETE", "/v1/requests/order-7"),
            ("GET", responses),
            ("GET", f"{responses}/input_items"),
            ("POST", f"{responses}/cancel"),
            ("DELETE", responses),
        ]
        for headers in (bearer("beta"), {}):
            for method, path in routes:
                if path.endswith("/explain") and not headers:
                    continue  # only tenants are separated from others
                refused = await scene.client.request(method, path, headers=headers)
                assert error(refused) in [(404, "request_not_found"), (404, "response_not_found")], (method, path)
                given = next(one for one in (text_id["id"], response_id, "order-7") if one in path)
                other = given[:-1] + ("A" if given[-1] != "A" else "B")
                unknown = await scene.client.request(method, path.replace(given, other), headers=headers)
                assert refused.text == unknown.text.replace(other, given), (method, path)
            for body in (
                {"previous_response_id": response_id, "input": "b"},
                {"input": [{"type": "item_reference", "id": f"msg_{response_id.removeprefix('resp_')}"}]},
            ):
                continued = await scene.client.post(RESPONSES, json={"model": NAME, **body}, headers=headers)
                assert continued.json()["error"]["code"] in ("previous_response_not_found", "item_not_found")
        await finished(scene, TEXT, text(**kept), **bearer("beta"), **{"x-request-id": "order-7"})
        for path in (answers, "/v1/requests/order-7"):
            for name in ("acme", "acme-2"):
                found = await scene.client.get(path, headers=bearer(name))
                assert found.json()["id"] == text_id["id"], "another tenant cannot hide an answer"
        assert (await scene.client.get(responses, headers=bearer("acme"))).status_code == 200
        assert (await scene.client.delete(answers, headers=bearer("acme-2"))).status_code == 200
        for name in ("acme", "beta"):
            assert await code_of(scene.client, bearer(name), answers) == (404, "request_not_found")
        assert scene.front.drain.in_flight == 0


async def test_an_idempotency_key_belongs_to_a_tenant() -> None:
    keys = key_of("acme"), key_of("acme-2", tenant="acme"), key_of("beta")
    async with keyed(*keys) as (scene, _):
        anonymous = {"authorization": "acme"}
        for headers in (bearer("acme"), {"x-api-key": "fb-acme-2"}, bearer("beta"), {}, anonymous):
            await finished(scene, TEXT, text(), **headers, **{"idempotency-key": "k"})
        found = [request.idempotency_key for request in scene.requests(RequestSubmitted)]
        assert found[0] == found[1]
        assert len(set(found)) == 4


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa01c902b7-01"


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (TEXT, {"user": "jane"}, "jane"),
        (CHAT, {"user": "joe", "safety_identifier": "jane"}, "jane"),
        (CHAT, {"user": 5, "safety_identifier": ""}, ""),
        (CHAT, {}, ""),
        (RESPONSES, {"user": "jane"}, "jane"),
        (RESPONSES, {"user": "joe", "safety_identifier": "jane"}, "jane"),
        (MESSAGES, {"metadata": {"user_id": "jane"}}, "jane"),
        (MESSAGES, {"metadata": {"user_id": 5}}, ""),
        (MESSAGES, {"metadata": "jane"}, ""),
    ],
)
async def test_the_log_has_a_hash_of_the_user_of_a_client(path: str, fields: dict[str, Any], named: str) -> None:
    body = {CHAT: chat(), TEXT: text(), RESPONSES: {"model": NAME, "input": "a"}, MESSAGES: chat()}[path]
    async with keyed(key_of("acme")) as (scene, _):
        for headers in (bearer("acme"), {}):
            await finished(scene, path, {**body, **fields}, **headers)
        users = [(one.tenant, one.end_user) for one in scene.requests(RequestSubmitted)]
        expected = [
            int.from_bytes(blake2b(f"{tenant}\0{named}".encode(), digest_size=8).digest(), "little") if named else 0
            for tenant in ("acme", "")
        ]
        assert users == list(zip(("acme", ""), expected, strict=True))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([TRACE], TRACE),
        ([TRACE.replace("00-", "01-", 1)], TRACE.replace("00-", "01-", 1)),
        ([TRACE, TRACE], ""),
        ([TRACE.upper()], ""),
        ([TRACE + "-x"], ""),
        ([TRACE + "\u00e9"], ""),
        ([f"00-{'0' * 32}-00f067aa01c902b7-01"], ""),
        ([f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01"], ""),
        ([TRACE.replace("00-", "ff-", 1)], ""),
        (["x" * 10_000], ""),
        ([""], ""),
        ([], ""),
    ],
)
async def test_an_invalid_trace_context_is_ignored(given: list[str], found: str) -> None:
    async with keyed() as (scene, _):
        headers = [(b"traceparent", value.encode("latin-1")) for value in given]
        pending = asyncio.create_task(scene.client.post(TEXT, json=text(), headers=headers))
        request = await scene.next_request()
        scene.reply(request.request_id, "the river")
        assert (await pending).status_code == 200
        assert (request.traceparent, request.tenant) == (found, "")


# --- files ------------------------------------------------------------------------------------------------------------


def line(key: KeySet) -> str:
    return encode(KEYS, key).decode() + "\n"


async def test_a_changed_file_counts_and_an_unusable_one_keeps_the_previous_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"plain\n\n{line(key_of('acme'))}")
    async with keyed(key_file=read_keys(path), admin_token=ADMIN_TOKEN) as (scene, _):
        keys = scene.front.keys

        async def accepted() -> list[str]:
            given = ("plain", "fb-acme", "fb-beta")
            return [key for key in given if (await code_of(scene.client, {"x-api-key": key}))[0] == 200]

        def warnings() -> list[str]:
            return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

        assert await accepted() == ["plain", "fb-acme"]
        assert await code_of(scene.client, {}) == (401, "invalid_api_key")
        path.write_text(line(key_of("acme", revoked_us=1)) + line(key_of("beta")))
        await keys.check_file()
        assert await accepted() == ["fb-beta"]
        assert await code_of(scene.client, bearer("acme")) == (401, "api_key_revoked")

        def half_written() -> None:
            path.write_text(line(key_of("acme")) + line(key_of("beta"))[:-20])

        unusable = [
            (half_written, "line 2 is no record of `forebay keys create`: keys: Input data was truncated"),
            (lambda: path.write_text("fine\nnot fine\n"), "line 2 is invalid; expected 1 to 4096 visible"),
            (lambda: path.write_text(f"{ADMIN_TOKEN}\n"), "a key is the admin token"),
            (lambda: path.write_text(""), "has no key"),
            (lambda: path.write_bytes(b"\xff"), "not UTF-8 text"),
            (path.unlink, "No such file or directory"),
        ]
        for count, (change, reason) in enumerate(unusable, 1):
            caplog.clear()
            change()
            for _ in range(2):
                await keys.check_file()
            assert await accepted() == ["fb-beta"]
            assert scene.metric(f"forebay_ingress_key_file_unusable_total {2 * count}.0")
            (warning,) = warnings()
            assert reason in warning
            assert warning.startswith(("--api-key-file", "cannot read --api-key-file"))
            assert warning.endswith("; the previous keys stay in use")
            assert not any(secret in warning for secret in ("fine\n", ADMIN_TOKEN, key_of("beta").key_hash))
        caplog.clear()
        path.write_text(line(key_of("acme")))
        for _ in range(2):
            await keys.check_file()
        assert (await accepted(), warnings()) == (["fb-acme"], [])
        path.write_text("")
        await keys.check_file()
        assert len(warnings()) == 1, "the same problem is logged again after the file was usable"


async def test_a_running_ingress_reads_the_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.ingress.api_keys.CHECK_S", 0)
    path = tmp_path / "keys"
    path.write_text(line(key_of("acme")))
    async with keyed(key_file=read_keys(path)) as (scene, _):
        path.write_text(line(key_of("beta")))
        await until(lambda: scene.front.keys.find(b"fb-beta") is not None)
        assert await code_of(scene.client, bearer("acme")) == (401, "invalid_api_key")
        assert scene.front.keys.find_id(key_of("beta").key_id) == key_of("beta")
        assert scene.front.keys.find_id(key_of("acme").key_id) is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"type":"key.set","tenant":"acme"}', "line 1 is no record .* required field `key_hash`"),
        ('{"type":"key.set","key_hash":"ab","tenant":"acme"}', "line 1 is no record"),
        ("a\n{fb-a-key", "line 2 is no record"),
        ("{" * 100_000, "line 1 is no record"),
        ("x" * (1 << 20) + "y", "is larger than 1048576 bytes"),
    ],
)
def test_an_invalid_file_is_rejected(content: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError, match=problem) as raised:
        read_keys(path)
    assert "fb-a-key" not in str(raised.value)


async def test_a_tenant_sees_only_its_own_requests_in_the_status_and_an_operator_all() -> None:
    tenants = tuple(TenantStatus(tenant=name, in_flight=2, queued=1) for name in ("acme", "beta"))
    log, _ = memory_log()
    status = await read_status(log, 0, NAME)
    log.close()
    status = replace(status, requests=replace(status.requests, tenants=tenants))

    async def read(_: str) -> GroupStatus:
        return status

    async with keyed(key_of("acme"), admin_token=ADMIN_TOKEN, admin_port=1) as (scene, _):
        app = build_app(scene.models, CollectorRegistry(), status_of=read)
        assert app.admin is not None
        own, anonymous, of_operator = [
            (await client_of(one).get("/v1/status", headers=headers)).json()["requests"]["tenants"]
            for one, headers in (
                (app, bearer("acme")),
                (app, {}),
                (app.admin, {"authorization": f"Bearer {ADMIN_TOKEN}", "host": "localhost"}),
            )
        ]
    assert own == [{"tenant": "acme", "in_flight": 2, "queued": 1}]
    assert anonymous == []
    assert [one["tenant"] for one in of_operator] == ["acme", "beta"]
