"""Prompts, keys and secrets appear in no log, metric, status, error or anonymised recording.

The inputs include mistakes of clients and operators. A client that writes a secret into a path, an id or a name makes
it public itself.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.cli import in_process
from tests.cli.up import ADMIN, ADMIN_TOKEN, PATIENCE_S, running

PROMPT = "Zanzibar-prompt-of-a-client"
PLAIN_KEY = "plain-key-0123456789"
WRONG_KEY = "wrong-key-0123456789"
TENANT = "tenant-of-a-client"
PASSWORD = "password-of-kafka"
MODEL = "forebay-default"
CHAT = "/v1/chat/completions"


class Found(NamedTuple):
    """What an operator can see of a system after some requests, by the place."""

    places: dict[str, str]
    secrets: dict[str, str]
    errors: list[str]


def bodies() -> Iterator[tuple[str, Any]]:
    """Yield a path and a body per valid request, and per mistake with the prompt or a key in it."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}
    yield CHAT, chat
    yield CHAT, {**chat, "stream": True}
    yield "/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    yield "/v1/embeddings", {"model": MODEL, "input": PROMPT}
    yield "/v1/responses", {"model": MODEL, "input": PROMPT, "max_output_tokens": 2}
    yield "/v1/messages", {**chat, "max_tokens": 2}
    yield "/tokenize", {"model": MODEL, "prompt": PROMPT}
    yield CHAT, {**chat, "api_key": PLAIN_KEY}
    yield CHAT, {**chat, "temperature": PROMPT}
    yield CHAT, {**chat, "max_tokens": PLAIN_KEY}
    yield CHAT, {**chat, "messages": PROMPT}
    yield CHAT, {**chat, "messages": [{"role": "user", "content": {"text": PROMPT}}]}
    yield CHAT, {**chat, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": PROMPT}]}]}
    yield CHAT, {**chat, "response_format": {"type": "json_schema", "json_schema": PROMPT}}
    yield CHAT, {**chat, "stop": [PROMPT] * 100}
    yield "/v1/completions", {"model": MODEL, "prompt": {"text": PROMPT}}
    yield "/v1/responses", {"model": MODEL, "input": [{"type": "message", "content": [PROMPT]}]}
    yield "/v1/messages", {**chat, "messages": [{"role": "user", "content": [PROMPT]}]}


def headers(tenant_key: str) -> Iterator[dict[str, str]]:
    """Yield headers with a valid key, and with keys in wrong places."""
    yield {"authorization": f"Bearer {tenant_key}"}
    yield {"x-api-key": PLAIN_KEY}
    yield {"authorization": f"Bearer {WRONG_KEY}"}
    yield {"authorization": tenant_key}
    yield {"authorization": f"Basic {PLAIN_KEY}"}
    yield {"api-key": tenant_key, "openai-api-key": PLAIN_KEY}
    yield {"cookie": f"key={PLAIN_KEY}", "x-api-key": f"Bearer {tenant_key}"}
    yield {"x-api-key": PLAIN_KEY, "idempotency-key": tenant_key}
    yield {"x-api-key": PLAIN_KEY, "traceparent": tenant_key}
    yield {"authorization": f"Bearer {ADMIN_TOKEN}"}


def admin_calls(tenant_key: str) -> Iterator[tuple[dict[str, str], Any]]:
    yield ADMIN, {"command": PROMPT}
    yield {"authorization": f"Bearer {tenant_key}"}, {}
    yield {"authorization": ADMIN_TOKEN}, {}
    yield {"x-api-key": ADMIN_TOKEN}, {}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("leaks")
    log, recording, keys = folder / "run.db", folder / "out.rec", folder / "keys"
    made = in_process.forebay("keys", "create", "--tenant", TENANT, "--file", keys)
    tenant_key = made.stdout.strip()
    (key,) = in_process.forebay("keys", "list", "--file", keys, "--json").stdout.splitlines()
    places: dict[str, str] = {}
    errors = []
    options = ("--log", str(log), "--workers", "2", "--admin-api", "--api-key", PLAIN_KEY, "--api-key-file", str(keys))
    with running(*options, "--routing-hints") as up, httpx.Client(base_url=up.url, timeout=PATIENCE_S) as client:
        replies = [
            client.post(path, json=body, headers={"authorization": f"Bearer {tenant_key}"}) for path, body in bodies()
        ]
        chat = next(bodies())[1]
        replies += [client.post(CHAT, json=chat, headers=given) for given in headers(tenant_key)]
        replies += [client.post("/v1/commands", json=body, headers=given) for given, body in admin_calls(tenant_key)]
        valid = {"x-api-key": PLAIN_KEY, "content-type": "application/json"}
        broken = json.dumps(chat)
        replies += [
            client.post(CHAT, content=broken[: broken.index(PROMPT) + len(PROMPT)], headers=valid),
            client.post(CHAT, content=f"{PROMPT} {tenant_key}", headers=valid),
            client.get("/v1/models", params={"api_key": tenant_key}),
        ]
        errors = [reply.text for reply in replies if reply.is_error]
        served = [reply for reply in replies if reply.is_success]
        assert len(served) >= 8, [reply.text for reply in replies]
        places["metrics"] = client.get("/metrics").text
        places["status"] = client.get("/v1/status", headers=valid).text
        # An id is public, so a client that uses a secret as one cannot be helped; a content type is only shown to it.
        client.post(CHAT, content=broken, headers={**valid, "content-type": tenant_key})
        client.get("/health", headers={"host": tenant_key})
        up.process.send_signal(signal.SIGTERM)
        places["log"] = up.process.communicate(timeout=PATIENCE_S)[0]
    assert f"tenant={TENANT}" in places["log"]
    for name in ("status", "verify"):
        places[f"forebay {name}"] = in_process.forebay(name, log, "--json").stdout
    run = in_process.forebay("record", log, recording, "--anonymize")
    assert run.returncode == 0, run.stderr
    places["forebay record"] = run.stdout + run.stderr
    places["recording"] = recording.read_bytes().decode("latin-1")
    key_id = json.loads(key)["key_id"]
    secrets = {"prompt": PROMPT, "plain key": PLAIN_KEY, "wrong key": WRONG_KEY, "tenant key": tenant_key}
    secrets |= {"admin token": ADMIN_TOKEN, "hash": json.loads(key)["key_hash"]}
    anonymous = {**secrets, "tenant": TENANT, "key id": key_id}
    assert [name for name, secret in anonymous.items() if secret in places["recording"]] == []
    original = log.read_bytes().decode("latin-1")
    assert (TENANT in original, key_id in original) == (True, True)
    assert [name for name, secret in secrets.items() if secret in original and name != "prompt"] == []
    return Found(places, secrets, errors)


def test_no_prompt_and_no_secret_is_shown(found: Found) -> None:
    assert {place for place, text in found.places.items() if not text} == set()
    leaks = [
        (place, name)
        for place, text in found.places.items()
        for name, secret in found.secrets.items()
        if secret in text
    ]
    assert leaks == []


def test_errors_do_not_repeat_prompts_and_secrets(found: Found) -> None:
    assert len(found.errors) > 15
    leaks = [(name, text) for text in found.errors for name, secret in found.secrets.items() if secret in text]
    assert leaks == []


@pytest.mark.parametrize(
    "properties",
    [
        f"security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.username=u\nsasl.password={PASSWORD}",
        f"sasl.password {PASSWORD}",
        f"sasl.passwort={PASSWORD}",
        f"sasl.mechanism={PASSWORD}",
    ],
    ids=["unreachable", "no separator", "unknown name", "wrong name"],
)
def test_the_password_of_kafka_is_not_shown(tmp_path: Path, properties: str, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "kafka.properties"
    file.write_text(properties)
    run = in_process.forebay("topics", "list", "--kafka", "127.0.0.1:1", "--kafka-config", file)
    assert run.returncode == 2
    assert PASSWORD not in run.stdout + run.stderr + caplog.text
    assert run.stderr.startswith("forebay: ")
