"""`@service` and `@endpoint()`: names, rejected definitions, and services in files."""

import dataclasses
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from forebay.events.requests import Sampling
from forebay.runtime.errors import ConfigError
from forebay.workers.service import (
    Refused,
    Request,
    Resources,
    ServiceInvalid,
    endpoint,
    load_service,
    service,
    service_of,
)


class Plain:
    """Class that becomes a service when decorated."""

    @endpoint()
    async def generate(self, request: Request) -> AsyncIterator[int]:
        yield request.token_ids[0]


def made(cls: type = Plain, **options: Any) -> Any:
    copy = type(cls.__name__, (cls,), {"__module__": f"tests.{options.get('component', '')}"})
    found = service_of(service(**{"namespace": "test", **options})(copy))
    assert found is not None
    return found


def test_a_service_and_its_endpoints_have_names() -> None:
    found = made(pool="gpu", workers=2, max_num_seqs=3, resources={"cpu": "1.5", "gpu": 2})
    assert found.name == "test.plain"
    assert found.endpoint_name("generate") == "test.plain.generate"
    assert (found.pool, found.workers, found.max_num_seqs, found.kv_events) == ("gpu", 2, 3, False)
    assert found.resources == Resources(1.5, 2)
    assert found.tasks == ("generate",)
    assert made(component="other").name == "test.other"
    assert service_of(Plain) is None


@pytest.mark.parametrize(
    ("name", "component"),
    [("Echo", "echo"), ("MyEngine", "my-engine"), ("HTTPEngine2", "http-engine2"), ("vLLM", "v-llm")],
)
def test_a_component_is_named_after_its_class(name: str, component: str) -> None:
    cls = type(name, (Plain,), {"__module__": f"tests.{name}"})
    found = service_of(service(namespace="named")(cls))
    assert found is not None
    assert found.component == component


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"namespace": "Demo"}, ", - and _. The first must be a letter"),
        ({"namespace": "a.b"}, "namespace 'a.b'"),
        ({"namespace": "x" * 64}, "1 to 63"),
        ({"component": "two words"}, "component 'two words'"),
        ({"pool": "-"}, "pool '-'"),
        ({"workers": 0}, "workers must be an integer from"),
        ({"workers": True}, "workers must be an integer from"),
        ({"max_num_seqs": 2.5}, "max_num_seqs must be an integer from"),
        ({"resources": {"memory": "1Gi"}}, "unknown resource 'memory'; resources are: cpu, gpu"),
        ({"resources": {"gpu": 0.5}}, "gpu must be an integer from"),
        ({"resources": {"gpu": "nan"}}, "gpu must be an integer from"),
        ({"resources": {"cpu": "many"}}, "resources must be numbers"),
        ({"resources": {"cpu": 0}}, "cpu must be a number of cores above 0"),
    ],
)
def test_invalid_service_is_rejected_at_its_definition(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ServiceInvalid, match=why):
        made(**options)


async def coroutine(self: object, requested: object) -> None: ...


async def greedy(self: object, one: object, two: object) -> None: ...


async def stream(self: object, requested: object) -> AsyncIterator[int]:
    yield 1


def marked(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """A copy of a function as an endpoint."""
    copy = FunctionType(function.__code__, globals(), function.__name__)
    return endpoint(name)(copy)


async def greedy_stream(self: object, one: object, two: object) -> AsyncIterator[int]:
    yield 0


def test_an_async_generator_of_another_name_is_an_endpoint_for_calls() -> None:
    found = service_of(service(namespace="test")(type("Calls", (), {"rank": marked(stream, "rank")})))
    assert found is not None
    assert (found.tasks, found.calls) == ((), ("test.calls.rank",))


@pytest.mark.parametrize(
    ("methods", "why"),
    [
        ({}, r"Broken has no generate endpoint: put @endpoint\(\) on an async generator"),
        ({"x": marked(coroutine, "generate")}, "generate must be an async generator: `async def` with `yield`"),
        ({"x": marked(stream, "embed")}, "the endpoint embed must be a coroutine"),
        ({"x": marked(greedy, "embed")}, "the endpoint embed must take self and one argument"),
        ({"x": marked(coroutine, "embed"), "y": marked(coroutine, "embed")}, "two endpoints embed: x and y"),
        ({"x": marked(coroutine, "No Name")}, r"Broken\.x: endpoint 'No Name'"),
        (
            {"x": marked(coroutine, "reboot")},
            r"Broken\.coroutine: unknown endpoint 'reboot'; endpoints are: generate, embed, clear_kv_blocks,"
            ".*; one for calls must be an async generator",
        ),
        ({"x": marked(stream, "sleep")}, "the endpoint sleep must be a coroutine"),
        ({"x": marked(greedy_stream, "rank")}, "the endpoint rank must take self and one argument"),
        ({f"x{at}": marked(stream, f"x{at}") for at in range(65)}, "65 endpoints for calls; the limit is 64"),
        (
            {"generate": Plain.generate, "start": greedy},
            r"Broken\.start must be a coroutine: `async def start\(self\)`",
        ),
        ({"generate": Plain.generate, "check": lambda _: None}, r"Broken\.check must be a coroutine"),
    ],
)
def test_class_without_endpoints_is_rejected(methods: dict[str, Callable[..., Any]], why: str) -> None:
    with pytest.raises(ServiceInvalid, match=why):
        service(namespace="test")(type("Broken", (), {"__module__": "tests.broken", **methods}))


def test_an_endpoint_needs_its_parentheses() -> None:
    with pytest.raises(ServiceInvalid, match=r"write the decorator with parentheses: @endpoint\(\)"):
        endpoint(coroutine)  # type: ignore[arg-type]


def test_two_classes_of_a_module_cannot_share_a_name() -> None:
    made(component="taken")
    made(component="taken")  # the same class, defined again
    other = type("Other", (Plain,), {"__module__": "tests.taken"})
    with pytest.raises(ServiceInvalid, match=r"the classes Plain and Other have the same service name test\.taken"):
        service(namespace="test", component="taken")(other)


GOOD = """
from forebay.workers.service import endpoint, service
import beside

@service(namespace="filed")
class Good:
    @endpoint()
    async def generate(self, request):
        yield beside.TOKEN

class Other:
    pass
"""


def test_service_file_is_executed_once(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("TOKEN = 7")
    file = tmp_path / "good.py"
    file.write_text(GOOD)
    found = load_service(f"{file}:Good")
    assert found.name == "filed.good"
    assert load_service(f"{file}:Good") is found


@pytest.mark.parametrize(
    ("text", "target", "why"),
    [
        (GOOD.replace("import beside", ""), "Bad", r"engine\.py has no class Bad; services in the file: Good"),
        (
            GOOD.replace("import beside", ""),
            "Other",
            r"is not a service: decorate the class with @service\(\.\.\.\); services in the file: Good",
        ),
        ("x = 1", "x", r"is not a service: decorate the class with @service\(\.\.\.\)"),
        ("def f(:", "F", r"SyntaxError: invalid syntax"),
        ("import nothing_like_this", "F", "ModuleNotFoundError: No module named"),
        (GOOD.replace('"filed"', '"No"').replace("import beside", ""), "Good", ", - and _. The first must be a letter"),
    ],
)
def test_file_without_the_service_is_rejected(tmp_path: Path, text: str, target: str, why: str) -> None:
    file = tmp_path / "engine.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        load_service(f"{file}:{target}")


@pytest.mark.parametrize(
    ("target", "why"), [("engine.py", "invalid service"), ("nowhere.py:X", r"nowhere\.py: no such file")]
)
def test_invalid_target_is_rejected(target: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_service(target)


async def test_the_examples_of_the_documentation_work(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs/workers.md"
    (parrot,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    file = tmp_path / "parrot.py"
    file.write_text(parrot)
    found = load_service(f"{file}:Parrot")
    assert (found.name, found.max_num_seqs) == ("demo.parrot", 16)
    assert set(found.endpoints) == {"generate", "clear_kv_blocks"}
    assert [token async for token in found.cls().generate(REQUEST)] == [1, 2, 3]


REQUEST = Request(request_id="r", token_ids=(1, 2, 3), sampling=Sampling(max_tokens=100))


async def test_request_shows_its_cancellation() -> None:
    assert not REQUEST.cancelled
    with pytest.raises(Refused, match="this request has no tokenizer"):
        _ = REQUEST.text
    requested = Request(request_id="r", token_ids=(1, 2), sampling=Sampling(max_tokens=1), detokenize=str)
    assert requested.text == "(1, 2)"
    dataclasses.replace(requested, priority=1).stopped.set()
    assert requested.cancelled
    await requested.until_cancelled()
