"""Clients of a running `forebay up`: the official OpenAI client, Schemathesis, and its pages in a browser."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from playwright.sync_api import Browser, expect
from pydantic import BaseModel

from forebay.ingress.kserve.messages import CLASSES, SERVICE
from tests.cli.up import ADMIN_TOKEN, Up, running
from tests.cli.up import forebay as process
from tests.harness.browser import Opened, visited
from tests.harness.local import free_ports

pytestmark = pytest.mark.timeout(180)
MODEL = "forebay-default"


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


class Step(BaseModel):
    explanation: str
    output: str


class MathResponse(BaseModel):
    steps: list[Step]
    final_answer: str


def tool(name: str, description: str, **properties: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = tool(
    "get_weather",
    "Get current temperature for a given location.",
    location={"type": "string", "description": "City and country e.g. Bogotá, Colombia"},
    units={"type": "string", "enum": ["celsius", "fahrenheit"]},
)
EMAIL = tool("send_email", "Send an email to a given recipient.", to={"type": "string", "format": "email"})
WEATHER["function"]["strict"] = True


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with running("--workers", "2") as up, up.client() as made:
        yield made


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI) -> None:
    messages = ask("What is the weather like in Paris today?")
    completion = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER, EMAIL])
    choice = completion.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert (set(arguments), arguments["units"] in ("celsius", "fahrenheit")) == ({"location", "units"}, True)
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "weather: 14 degrees"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER, EMAIL], max_tokens=8)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_parsed_structured_outputs(client: openai.OpenAI) -> None:
    event = client.chat.completions.parse(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Extract the event information."},
            {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
        ],
        response_format=CalendarEvent,
    )
    assert event.choices[0].finish_reason == "stop"
    assert isinstance(event.choices[0].message.parsed, CalendarEvent)
    with client.chat.completions.stream(
        model=MODEL, messages=ask("how can I solve 8x + 7 = -23"), response_format=MathResponse
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    parsed = final.choices[0].message.parsed
    assert parsed is not None
    assert parsed.steps[0].explanation


@pytest.mark.parametrize(
    "options", [{"reasoning_effort": "low"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}]
)
def test_reasoning_is_separate_if_requested(client: openai.OpenAI, options: dict[str, Any]) -> None:
    messages = ask("How many letters r are in strawberry?")
    completion = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=60, **options)
    message = completion.choices[0].message
    assert message.model_extra is not None
    assert len(message.model_extra["reasoning_content"].split()) > 10
    assert "</think>" not in (message.content or "</think>")
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=60, stream=True, seed=3, **options
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert any((delta.model_extra or {}).get("reasoning_content") for delta in deltas)
    assert any(delta.content for delta in deltas)


def test_tool_choice_forces_or_forbids_a_call(client: openai.OpenAI) -> None:
    def call_of(choice: Any, text: str = "Hello") -> Any:
        given = client.chat.completions.create(
            model=MODEL, messages=ask(text), tools=[WEATHER, EMAIL], tool_choice=choice, max_tokens=80
        )
        return given.choices[0].message.tool_calls, given.choices[0].finish_reason

    assert call_of("auto") == (None, "length")
    assert call_of("none", "What is the weather?") == (None, "length")
    (call, *_), reason = call_of("required")
    assert (call.function.name in ("get_weather", "send_email"), reason) == (True, "tool_calls")
    (call,), reason = call_of({"type": "function", "function": {"name": "send_email"}})
    assert (call.function.name, reason) == ("send_email", "tool_calls")
    assert json.loads(call.function.arguments)["to"].endswith("@example.com")


def test_json_mode_and_choices_of_vllm(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=ask("Answer in JSON"), response_format={"type": "json_object"}
    )
    assert isinstance(json.loads(completion.choices[0].message.content or ""), dict)
    labels = ["positive", "negative"]
    chosen = client.chat.completions.create(
        model=MODEL, messages=ask("Wonderful!"), extra_body={"structured_outputs": {"choice": labels}}
    )
    assert chosen.choices[0].message.content in labels


def test_reasoning_before_a_call_and_none_unless_asked(client: openai.OpenAI) -> None:
    thinking = client.chat.completions.create(
        model=MODEL, messages=ask("What is the weather?"), tools=[WEATHER], reasoning_effort="high"
    )
    message = thinking.choices[0].message
    assert message.tool_calls
    assert (message.model_extra or {})["reasoning_content"]
    plain = client.chat.completions.create(
        model=MODEL, messages=ask("What is the weather?"), reasoning_effort="minimal", max_tokens=5
    )
    assert "reasoning_content" not in (plain.choices[0].message.model_extra or {})


@pytest.mark.parametrize(("temperature", "texts"), [(openai.omit, 3), (0.7, 3), (0, 1)])
def test_choices_differ_without_a_seed_except_at_temperature_0(
    client: openai.OpenAI, temperature: Any, texts: int
) -> None:
    options: Any = {"model": MODEL, "messages": ask("Hi"), "n": 3, "temperature": temperature}
    for completion in (
        client.chat.completions.create(**options, max_tokens=8),
        client.chat.completions.parse(**options, response_format=CalendarEvent),
    ):
        assert len({choice.message.content for choice in completion.choices}) == texts


SCHEMATHESIS = str(Path(sys.executable).with_name("schemathesis"))
SEED = 15
PHASES, EXAMPLES, CASES_MIN = "coverage,fuzzing", 20, 500  # every boundary value, then random bodies
WITHIN_S = 540.0  # on a busy machine
CONFIG = """
[checks.not_a_server_error]
# A timeout of a microsecond, and a log in memory that is to be explained, are no faults of the server.
expected-statuses = ["2xx", "3xx", "4xx", "501", "502", "503", "504"]
"""
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method,ignored_auth"
)
# JSON Schema cannot express which characters of an adapter name are printable in Unicode, which tokens and chats a
# model accepts, and which ranges of a grid fit together. Other routes reject most random bodies because of an unknown
# model, but tokenizing needs no model name.
INEXACT = "lora|commands|tokenize|pools/routing"
# Nor that `tool_choice` names one of the tools. A route query takes the body of a completion, but has one prompt. And
# the model decides which token ids and dimensions are valid.
PROMPTS = "completions|route|embeddings|responses|messages"


@pytest.mark.parametrize(
    "options",
    [
        ("--exclude-path-regex", f"{INEXACT}|{PROMPTS}", "--checks", f"{CHECKS},positive_data_acceptance"),
        ("--include-path-regex", PROMPTS, "--checks", CHECKS),
        ("--include-path-regex", INEXACT, "--checks", CHECKS),
    ],
    ids=["exact", "prompts", "inexact"],
)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_service_conforms_to_its_openapi_document(tmp_path: Path, options: tuple[str, ...]) -> None:
    # Nobody reads the output of this system until it ends, and thousands of access lines would fill the pipe.
    with running("--admin-api", "--workers", "2", "--timeout-s", "10", "--no-access-log") as up:
        config = tmp_path / "schemathesis.toml"
        config.write_text(CONFIG)
        command = [
            *(SCHEMATHESIS, "--config-file", str(config), "run", f"{up.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {ADMIN_TOKEN}"),
            *("--seed", str(SEED), "--max-examples", str(EXAMPLES), "--phases", PHASES),
            *options,
            *("--continue-on-failure", "--no-color"),
            *("--generation-database", "none", "--suppress-health-check", "all", "--request-timeout", "60"),
        ]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=WITHIN_S)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    cases = re.search(r"(\d+) generated", run.stdout)
    assert cases is not None, run.stdout
    assert int(cases[1]) >= CASES_MIN, run.stdout


LINKED = ["docs", "openapi.json", "v1/models", "v1/status", "health", "metrics"]


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with running("--workers", "1") as found:
        yield found


def require_own_requests(found: Opened, up: Up) -> None:
    """Check that the page had no error and requested nothing but files of the ingress."""
    assert found.errors == []
    assert [url for url in found.requests if not url.startswith((f"{up.url}/", "data:"))] == []


def operations(found: Opened) -> list[str]:
    return found.page.locator(".opblock-summary-path").all_inner_texts()


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "/team/forebay"])
def test_the_index_links_to_pages_that_respond(up: Up, browser: Browser, prefix: str) -> None:
    with visited(up.url, "/", browser, prefix=prefix) as found:
        links = [link.evaluate("link => link.href") for link in found.page.get_by_role("link").all()]
        assert links == [f"{up.url}{prefix}/{path}" for path in LINKED]
        expect(found.page.get_by_role("paragraph")).to_contain_text("serving forebay-default")
        assert found.page.evaluate("getComputedStyle(document.body).maxWidth") == "640px"  # the policy allows the style
        for link in links:
            response = found.page.goto(link)
            assert response is not None
            assert response.ok, link
        require_own_requests(found, up)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "/team/forebay"])
def test_the_docs_list_the_api_and_send_requests(up: Up, browser: Browser, prefix: str) -> None:
    with visited(up.url, "/docs", browser, prefix=prefix) as found:
        models = found.page.locator(".opblock", has=found.page.get_by_text("/v1/models", exact=True)).first
        models.locator(".opblock-summary").click()
        models.get_by_role("button", name="Try it out").click()
        models.get_by_role("button", name="Execute").click()
        expect(models.locator(".live-responses-table .response-col_status").last).to_contain_text("200")
        expect(models.locator(".live-responses-table")).to_contain_text("forebay-default")
        assert f"{up.url}{prefix}/v1/models" in found.requests
        assert {"/health", "/v1/chat/completions", "/v1/embeddings"} <= {
            path.replace("\u200b", "") for path in operations(found)
        }
        require_own_requests(found, up)


def test_the_kserve_api_is_served_beside_http(tmp_path: Path) -> None:
    log, port = str(tmp_path / "log.db"), free_ports(1)
    with running("--log", log, "--grpc-port", str(port)) as up, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert f"KServe API by gRPC on 127.0.0.1:{port}\n" in up.banner()
        taken = process("up", "--port", str(free_ports(1)), "--grpc-port", str(port))
        assert taken.returncode == 2
        # Found before any engine starts, so with the name of the process.
        assert re.search(r"in use by process \d+, .*; choose another --grpc-port", taken.stderr), taken.stderr
        request, response = CLASSES["ModelInferRequest"], CLASSES["ModelInferResponse"]
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer", request.SerializeToString, response.FromString)
        contents = {"bytes_contents": [b"Hello"]}
        prompt = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": contents}
        answer = infer(request(model_name=MODEL, inputs=[prompt]), timeout=30)
        explained = process("explain", log, answer.id)
    assert f"model {MODEL}, 3 prompt tokens" in explained.stdout, explained.stderr
