"""Names of adapters over HTTP: invalid names are rejected before a command is sent."""

import pytest

from tests.ingress.commands import LORA, answered, given, outcome
from tests.ingress.conftest import ADMIN_TOKEN, MODULE_LOOP, NAME, Scene


@pytest.fixture(scope="module")
def admin_token() -> str:
    return ADMIN_TOKEN


@pytest.mark.parametrize(
    "name", [NAME, "../x", "a/../b", "/etc/passwd", "a\0b", "a\nb", " sql", "sql ", "\x1b[2J", "x" * 257]
)
@MODULE_LOOP
@pytest.mark.parametrize("path", ["/v1/loras", "/v1/load_lora_adapter", "/v1/commands"])
async def test_adapters_need_a_valid_model_name(shared_scene: Scene, path: str, name: str) -> None:
    body = {**LORA, "lora_name": name, **({"action": "load_lora"} if path == "/v1/commands" else {})}
    response = await shared_scene.client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "lora_name")
    assert error["message"].isprintable()
    assert given(shared_scene.log) == []


async def test_adapters_accept_every_valid_model_name(scene: Scene) -> None:
    for count, name in enumerate(("org/sql:v2", "meta-llama/Llama-3.1-8B-sql"), 1):
        call = scene.client.post("/v1/loras", json={**LORA, "lora_name": name})
        response, command = await answered(scene, call, outcome(), count=count)
        assert (response.status_code, command.command.lora_name) == (200, name)
