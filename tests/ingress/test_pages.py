"""The pages `/` and `/docs`, and /openapi.json. tests/cli/test_up_api.py opens the pages in a browser."""

import json
from importlib.metadata import version
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from forebay.ingress.access_log import PROBES
from forebay.ingress.http.queries import TokenizeTextBody
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.requests import TextBody
from tests.ingress.conftest import ADMIN_TOKEN, CHAT, MESSAGES, MODULE_LOOP, NAME, TEXT, Scene, chat, error, make_scene

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


async def test_the_index_is_a_page_for_browsers_and_json_for_other_clients(scene: Scene) -> None:
    page = await scene.client.get("/", headers={"accept": BROWSER})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<script" not in page.text
    assert version("forebay") in page.text
    plain = await scene.client.get("/", headers={"accept": "*/*"})
    found = plain.json()
    assert (found["name"], found["version"], found["model"]) == ("forebay", version("forebay"), NAME)
    assert page.headers["vary"] == plain.headers["vary"] == "accept"
    for path in found["links"].values():
        assert f'href="{path}"' in page.text
        is_served = path != "v1/status"  # a scene has no owner
        assert (await scene.client.get(f"/{path}")).status_code == (200 if is_served else 501), path


@MODULE_LOOP
@pytest.mark.parametrize("path", ["/", "/docs", "/docs/start.js", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js"])
async def test_pages_have_a_strict_policy(shared_scene: Scene, path: str) -> None:
    response = await shared_scene.client.get(path, headers={"accept": BROWSER})
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    for part in ("default-src 'none'", "base-uri 'none'", "frame-ancestors 'none'"):
        assert part in policy
    assert "'unsafe-eval'" not in policy
    assert "http" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_other_sites_may_link_to_pages_but_not_load_their_files(scene: Scene) -> None:
    elsewhere = {"sec-fetch-site": "cross-site", "accept": BROWSER}
    for path, status in (("/", 200), ("/docs", 200), ("/docs/start.js", 403)):
        assert (await scene.client.get(path, headers=elsewhere)).status_code == status, path


@MODULE_LOOP
@pytest.mark.parametrize("name", ["index.html", "__init__.py", "main.py", "..%2Fmain.py"])
async def test_docs_serve_no_other_files(shared_scene: Scene, name: str) -> None:
    assert (await shared_scene.client.get(f"/docs/{name}")).status_code == 404


async def test_the_name_of_a_model_is_escaped() -> None:
    async with make_scene(model_name="<b>&x", admin_token="") as scene:
        page = (await scene.client.get("/", headers={"accept": BROWSER})).text
        assert "<b>" not in page
        assert "&lt;b&gt;&amp;x" in page


ERROR = {"$ref": "#/components/schemas/Error"}
MESSAGES_ERROR = {"$ref": "#/components/schemas/MessagesError"}


@pytest.fixture(scope="module")
def admin_token() -> str:
    return ADMIN_TOKEN


async def document(scene: Scene) -> dict[str, Any]:
    found: dict[str, Any] = (await scene.client.get("/openapi.json")).raise_for_status().json()
    return found


async def test_every_error_matches_its_schema(scene: Scene) -> None:
    whole = await document(scene)
    for path, operations in whole["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            assert "422" not in responses, path
            assert {"200", "403", "405", "431", "503"} <= responses.keys(), path
            if "requestBody" in operation:
                assert {"400", "413", "415"} <= responses.keys(), path
            if "security" in operation:
                assert "401" in responses, path
            assert ("security" in operation) is (path in ADMIN), (method, path)
            for status, response in responses.items():
                if status != "200":
                    schema = MESSAGES_ERROR if path.startswith(MESSAGES) else ERROR
                    assert response["content"] == {"application/json": {"schema": schema}}, (path, status)
    assert whole["paths"].keys() >= PROBES
    for path in (CHAT, TEXT, MESSAGES):
        content = whole["paths"][path]["post"]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "text/event-stream"}


ADMIN = {
    *("/busy_threshold", "/clear_kv_blocks", "/disaggregation", "/pause", "/reset_prefix_cache", "/resume"),
    *("/sleep", "/v1/commands", "/v1/load_lora_adapter", "/v1/loras", "/v1/loras/{lora_name}", "/v1/pools"),
    *("/v1/pools/canary", "/v1/pools/drain", "/v1/pools/policy", "/v1/pools/routing", "/v1/unload_lora_adapter"),
    "/wake_up",
}


@MODULE_LOOP
@pytest.mark.parametrize(
    ("name", "body", "is_valid"),
    [
        ("ChatBody", chat(n=1, user="u", stop=["a"], modalities=["text"]), True),
        ("ChatBody", chat(n=0), False),
        ("ChatBody", chat(magic=1), False),
        ("ChatBody", chat(stop=""), False),
        ("ChatBody", chat(stop=["a"] * 5), False),
        ("ChatBody", chat(stream=True, stream_options={}), True),
        ("ChatBody", chat(stream_options={}), False),
        ("ChatBody", chat(top_logprobs=2), False),
        ("ChatBody", chat(tool_choice="required"), False),
        ("ChatBody", chat(nvext={"annotations": ["query_instance_id:x"]}), True),
        ("ChatBody", chat(nvext={"annotations": ["x"]}), False),
        ("TextBody", {"model": NAME, "prompt": [1, 2], "suffix": None}, True),
        ("TextBody", {"model": "other", "prompt": [1.0, 2], "max_tokens": 5.0}, True),
        ("TextBody", {"model": NAME, "prompt": ["a", "b"], "echo": True, "n": 2}, True),
        ("TextBody", {"model": NAME, "prompt": "a", "echo": True, "logprobs": 1}, False),
        ("EmbeddingBody", {"model": NAME, "input": ["a"], "user": "u"}, True),
        ("EmbeddingBody", {"model": NAME, "input": "a", "nvext": {"extra_fields": ["worker_id"]}}, False),
        ("AnyCommandBody", {"action": "pause", "timeout_s": 1}, True),
        ("AnyCommandBody", {"action": "dream"}, False),
        ("LoraBody", {"lora_name": "x", "source": {"uri": "file:///x"}, "lora_int_id": 3}, True),
        ("LoraBody", {"lora_name": "x", "source": {"uri": "gs://x"}}, False),
        ("DisaggregationBody", {"model": NAME, "policy": "never"}, True),
        ("DisaggregationBody", {"model": NAME, "policy": "other"}, False),
    ],
)
async def test_schemas_accept_what_the_service_accepts(
    shared_scene: Scene, name: str, body: dict[str, Any], is_valid: bool
) -> None:
    whole = await document(shared_scene)
    schema = {"$ref": f"#/components/schemas/{name}", "components": whole["components"]}
    assert Draft202012Validator(schema).is_valid(body) is is_valid


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": [1.0, 2], "max_tokens": 5.0}, 404),
        ({"prompt": [1.5, 2]}, 400),
        ({"prompt": "a", "max_tokens": 1e400}, 400),
        ({"prompt": "a", "max_tokens": True}, 400),
        ({"prompt": "a", "max_tokens": "5"}, 400),
    ],
)
@MODULE_LOOP
async def test_integral_floats_are_accepted_as_integers(shared_scene: Scene, body: dict[str, Any], status: int) -> None:
    response = await shared_scene.client.post(TEXT, content=json.dumps({"model": "other", **body}))
    assert response.status_code == status, response.text


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]], [[1], []]])
def test_schemas_of_completions_and_embeddings_have_no_empty_prompts(prompt: Any) -> None:
    for body, field in ((TextBody, "prompt"), (EmbeddingBody, "input")):
        schema = body.model_json_schema()["properties"][field]
        assert not Draft202012Validator(schema).is_valid(prompt)
        for valid in ("a", [1], ["a"], [[1]]):
            Draft202012Validator(schema).validate(valid)


@pytest.mark.parametrize("prompt", ["", []])
def test_the_schema_of_tokenize_has_an_empty_prompt(prompt: Any) -> None:
    Draft202012Validator(TokenizeTextBody.model_json_schema()["properties"]["prompt"]).validate(prompt)


async def test_health_and_the_list_of_models_are_served(scene: Scene) -> None:
    assert (await scene.client.get("/live")).status_code == 200
    assert (await scene.client.get("/ready")).status_code == 200
    scene.only.owner.owner = None
    for path in ("/ready", "/health"):
        response = await scene.client.get(path)
        assert error(response) == (503, "not_ready")
    assert (await scene.client.get("/live")).status_code == 200
    models = (await scene.client.get("/v1/models")).json()
    assert [card["id"] for card in models["data"]] == [NAME]
    assert (await scene.client.get(f"/v1/models/{NAME}")).json()["object"] == "model"
    assert (await scene.client.get("/v1/models/gpt")).status_code == 404
    assert "dynamo_frontend_inflight_requests" in (await scene.client.get("/metrics")).text
    assert CHAT in (await scene.client.get("/openapi.json")).json()["paths"]
