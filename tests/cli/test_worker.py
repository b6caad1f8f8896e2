"""`forebay worker --upstream` with servers that respond, hang or are lost, and `forebay serve`."""

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay import runtime
from forebay.cli.processes.command import UPSTREAMS_MAX, UpstreamOptions
from forebay.cli.processes.engine_options import EngineOptions
from forebay.cli.processes.serve import Share, devices, run_shares, shares
from forebay.cli.processes.worker import check_options
from forebay.events.codec import encode
from forebay.events.heartbeats import RejectedWorker, RouterHeartbeat
from forebay.events.topics import HEARTBEATS
from forebay.ingress.model import DEFAULT_MODEL
from forebay.processes import worker as attached_module
from forebay.processes.engines import EngineChoice
from forebay.processes.worker import (
    AttachedWorkers,
    Attachment,
    Upstream,
    UpstreamSettings,
    WorkerSettings,
    attachments,
    report_waits,
)
from forebay.runtime.errors import ConfigError
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.engine import EngineError
from forebay.workers.engines import tokenizer_check
from forebay.workers.engines.attached.engine import AttachedEngine
from forebay.workers.engines.attached.server import ServerInfo
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.metrics import Probes
from forebay.workers.runtime.worker import WorkerReplaced
from forebay.workers.service import Request, Service, endpoint, service, service_of
from tests.cli.in_process import error_of, forebay
from tests.harness import fork_server
from tests.harness.local import free_ports
from tests.harness.openai_server import OpenAiServer
from tests.workers.attached import prefix_space

URL = "http://127.0.0.1:8000"
NOTHING: Any = None


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("127.0.0.1:8000", "expected http://host:port"),
        ("ftp://host", "expected http://host:port"),
        ("http://", "expected http://host:port"),
        ("http://host:99999", "expected http://host:port"),
        ("http://[::1", "expected http://host:port"),
        ("http://host:1/v1", "leave out /v1"),
        ("http://host:1?x=1", "expected http://host:port"),
        ("http://ho\tst:1", "expected http://host:port"),
    ],
)
def test_an_address_that_is_none_is_rejected(url: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        UpstreamOptions(upstream=[url]).upstreams()
    assert hint in str(error.value)
    assert url in str(error.value)


def test_a_password_in_an_address_is_rejected_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="--upstream-api-key-file instead") as error:
        UpstreamOptions(upstream=["http://me:secret@host:1"]).upstreams()
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://host:8000/", "host-8000"),
        ("http://host", "host-80"),
        ("https://Host", "host-443"),
        ("http://[::1]:8000", "::1-8000"),
    ],
)
def test_a_worker_is_named_after_its_server(url: str, name: str) -> None:
    (one,) = attachments(UpstreamOptions(upstream=[url]).upstreams(), "")
    assert (one.worker_id, one.upstream and one.upstream.url) == (name, url.rstrip("/"))


def test_a_given_name_has_the_number_of_the_server() -> None:
    servers = [Upstream("http://a"), Upstream("http://b")]
    assert [one.worker_id for one in attachments(servers, "w")] == ["w-0", "w-1"]
    assert [one.worker_id for one in attachments(servers[:1], "w")] == ["w"]
    with pytest.raises(ConfigError, match="--id"):
        attachments(servers[:1], "a name")


@pytest.mark.parametrize("other", [URL, f"{URL}/", "https://127.0.0.1:8000"])
def test_a_server_that_appears_twice_is_rejected(other: str) -> None:
    with pytest.raises(ConfigError, match=f"--upstream {URL}: the server appears twice"):
        attachments(UpstreamOptions(upstream=[URL, other]).upstreams(), "w")


def test_kv_events_are_those_of_the_server_in_the_same_place() -> None:
    urls = ["http://a", "http://b", "http://c"]
    events = ["tcp://a:1", "-", "tcp://c:1,tcp://c:2"]
    servers = UpstreamOptions(upstream=urls, upstream_kv_events=events).upstreams()
    assert [(one.kv_events, one.kv_replay) for one in servers] == [
        ("tcp://a:1", ""),
        ("", ""),
        ("tcp://c:1", "tcp://c:2"),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"upstream_kv_events": ["-"]}, "--upstream-kv-events requires --upstream URL"),
        ({"upstream_api_key_file": Path("key")}, "--upstream-api-key-file requires --upstream URL"),
        ({"allow_shared_cache": True}, "--allow-shared-cache requires --upstream URL"),
        ({"upstream": [URL] * (UPSTREAMS_MAX + 1)}, "got 65 servers, the maximum of one process is 64"),
        ({"upstream": [URL], "upstream_kv_events": ["-", "-"]}, "got 2 values for 1 servers"),
        (
            {"upstream": [URL], "upstream_kv_events": ["host:1"]},
            "--upstream-kv-events host:1: expected tcp://host:port",
        ),
        ({"upstream": [URL], "upstream_kv_events": ["tcp://h:1,"]}, "expected tcp://host:port of the KV events, or"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        UpstreamOptions(**options).upstreams()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\xff", "not UTF-8 text"),
        (b"two keys", "expected one key of visible ASCII characters"),
    ],
)
def test_a_key_that_cannot_be_read_is_rejected(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        UpstreamOptions(upstream_api_key_file=file).api_key()
    assert message in str(error.value)
    assert str(file) in str(error.value)


def test_a_key_is_read_without_the_end_of_its_line(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-1\n")
    assert (UpstreamOptions(upstream_api_key_file=file).api_key(), UpstreamOptions().api_key()) == ("sk-1", "")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"engine": "vllm"}, "--engine cannot be combined with --upstream"),
        ({"dp_size": 2}, "--dp-size cannot be combined with --upstream"),
        ({"role": "encode"}, "--role encode: a server that already runs supports aggregated, prefill, decode"),
    ],
)
def test_options_of_an_engine_are_rejected(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_options(EngineOptions(**option))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "option",
    [["--kv-host", "h"], ["--dp-start-rank", "1"], ["--speedup", "2"], ["--embedding-cache-size", "1MB"]],
)
def test_the_command_rejects_options_of_an_engine(option: list[str]) -> None:
    assert f"{option[0]} cannot be combined with --upstream" in error_of(
        "worker", "--kafka", "127.0.0.1:1", "--upstream", URL, *option
    )


def test_only_an_encode_worker_has_a_cache_of_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[WorkerSettings] = []
    monkeypatch.setattr("forebay.cli.processes.worker.run", started.append)
    monkeypatch.setattr("forebay.cli.processes.worker.run_service", lambda _: None)
    forebay("worker", "--kafka", "127.0.0.1:1", "--role", "encode", "--embedding-cache-size", "500MB")
    (engine,) = (one.engine for one in started)
    assert isinstance(engine, EngineChoice)
    assert engine.settings.embedding_cache_bytes == 500_000_000
    error = error_of("worker", "--kafka", "127.0.0.1:1", "--embedding-cache-size", "1MB")
    assert "--embedding-cache-size requires --role encode, got aggregated" in error


def settings_of(**options: Any) -> WorkerSettings:
    return WorkerSettings(cluster=NOTHING, worker_id="w", engine=UpstreamSettings(servers=(), **options), drain_s=1.0)


def engine_of(info: ServerInfo, **options: Any) -> Any:
    return attached_module.engine_of(attachments([Upstream(URL)], "w")[0], info, settings_of(**options))


@pytest.mark.parametrize("root", ["", "/nowhere", "x" * 5000, "/" + "x" * 5000, "a\0b", "a b c"])
def test_a_server_without_a_tokenizer_is_rejected(root: str) -> None:
    with pytest.raises(ConfigError, match=r"serves /served, but names no directory .* set --model to a directory"):
        engine_of(ServerInfo(kind="openai", model="/served", root=root))


def test_the_tokenizer_is_that_of_the_root_or_of_the_option(tmp_path: Path) -> None:
    root = str(DEFAULT_MODEL)
    for info, options in (
        (ServerInfo(kind="vllm", model="m", root=root), {}),
        (ServerInfo(kind="vllm", model=root), {"model_name": "m"}),
        (ServerInfo(kind="vllm", model="m", root=str(tmp_path)), {"model": root}),
    ):
        _, spec, folder = engine_of(info, **options)
        assert (spec.model, spec.engine, folder) == ("m", "vllm", DEFAULT_MODEL)
    with pytest.raises(ConfigError, match="tokenizer"):
        engine_of(ServerInfo(kind="vllm", model="m", root=str(tmp_path)))


def test_the_endpoint_of_a_server_is_an_ip_address_and_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = {
        "http://127.0.0.1:8001": "127.0.0.1:8001",
        "https://127.0.0.1": "127.0.0.1:443",
        "http://[::1]:8": "[::1]:8",
    }
    assert {url: Upstream(url).endpoint for url in urls} == urls
    info = ServerInfo(kind="vllm", model="m", root=str(DEFAULT_MODEL))
    assert engine_of(info)[1].endpoint == Upstream(URL).endpoint

    def unknown(*_: Any, **__: Any) -> Any:
        raise OSError("no such name")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    with pytest.raises(EngineError, match="has no address: no such name"):
        engine_of(info)


Step = Callable[[Attachment], Awaitable[None]]


class Fleet(AttachedWorkers):
    """The workers of servers, whose attachment is a script of steps."""

    def __init__(self, *steps: Step) -> None:
        one = attachments([Upstream(URL)], "w")
        super().__init__(settings_of(), NOTHING, NOTHING, one, CollectorRegistry())
        self.one = one[0]
        self.steps = list(steps)
        self.reached = asyncio.Event()

    async def attach(self, one: Attachment) -> None:
        self.reached.set()
        await self.steps.pop(0)(one)


@pytest.fixture(autouse=True)
async def no_pause(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(attached_module, "RETRY_S", 0.0)
    yield


def raising(error: BaseException) -> Step:
    async def step(one: Attachment) -> None:
        raise error

    return step


async def drained(one: Attachment) -> None:
    one.model = "m"


async def hanging(one: Attachment) -> None:
    await asyncio.Event().wait()


DIFFERS = r"the tokenizer of the server http://\S+ differs from \S+/changed/tokenizer\.json"
LOST = EngineError("the server does not respond")


async def test_a_lost_server_is_attached_again(caplog: pytest.LogCaptureFixture) -> None:
    groups = [BaseExceptionGroup("", [BaseExceptionGroup("", [LOST])]) for _ in range(2)]
    fleet = Fleet(raising(LOST), *map(raising, groups), raising(EngineError("another reason")), drained)
    await fleet.run()
    assert not fleet.steps
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [str(LOST), "another reason"]


async def test_pauses_before_a_lost_server_is_tried_again_grow_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep, now_s = asyncio.sleep, [0.0]

    async def noted(pause_s: float) -> None:
        pauses.append(pause_s)
        await sleep(0)

    async def served(one: Attachment) -> None:
        now_s[0] += 3_600.0
        raise LOST

    monkeypatch.setattr(attached_module, "RETRY_S", 2.0)
    monkeypatch.setattr(asyncio, "sleep", noted)
    monkeypatch.setattr(runtime, "monotonic_s", lambda: now_s[0])
    fleet = Fleet(*[raising(LOST)] * 7, served, raising(LOST), drained)
    await fleet.run()
    assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 2.0, 4.0]


async def test_a_server_that_returns_unusable_is_waited_for_but_not_at_the_first_time() -> None:
    fleet = Fleet(raising(ConfigError("no tokenizer")))
    with pytest.raises(ConfigError, match="no tokenizer"):
        await fleet.run()
    fleet = Fleet(raising(ConfigError("no tokenizer")), drained)
    fleet.one.model = "m"
    await fleet.run()
    assert not fleet.steps


@pytest.mark.parametrize("also_lost", [False, True])
async def test_a_replaced_worker_ends_the_process(also_lost: bool) -> None:
    fleet = Fleet(raising(BaseExceptionGroup("", [WorkerReplaced("w"), *[LOST] * also_lost])), drained)
    with pytest.raises(EngineError, match="w"):
        await fleet.run()


async def test_a_stop_does_not_wait_for_a_server_or_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_module, "RETRY_S", 3600.0)
    for step in (hanging, raising(LOST)):
        fleet = Fleet(step)
        running = asyncio.create_task(fleet.run())
        await fleet.reached.wait()
        await fleet.stop()
        await running


async def test_a_stop_drains_the_workers_and_attaches_no_server_again() -> None:
    drains: list[float] = []

    async def lost_in_drain(one: Attachment) -> None:
        one.worker = cast(Any, SimpleNamespace(active_requests=(), drain=drains.append))
        await fleet.stop()
        raise LOST

    fleet = Fleet(lost_in_drain)
    await fleet.run()
    assert drains == [1.0]


async def test_a_server_that_serves_another_model_is_not_attached_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def described(_upstream: Upstream, _settings: UpstreamSettings) -> ServerInfo:
        return ServerInfo(kind="vllm", model="other", root=str(DEFAULT_MODEL))

    monkeypatch.setattr(attached_module, "described", described)
    one = attachments([Upstream(URL)], "w")[0]
    fleet = AttachedWorkers(settings_of(), NOTHING, NOTHING, [one], CollectorRegistry())
    for one.model, one.root, known in (("m", "", r"m \(root ''\)"), ("other", "/old", r"other \(root '/old'\)")):
        with pytest.raises(
            EngineError, match=rf"serves other now \(root '/.*'\), but worker w joined with {known}; restart"
        ):
            await fleet.attach(one)


async def test_a_server_with_another_tokenizer_ends_the_command_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def reached(*_: Any) -> Any:
        raise LookupError

    monkeypatch.setattr(attached_module, "stored_card", reached)  # after the server was accepted
    caplog.set_level("INFO", tokenizer_check.__name__)
    changed = Path(shutil.copytree(DEFAULT_MODEL, tmp_path / "changed"))
    prefix_space(changed / "tokenizer.json")

    async def attach(server: OpenAiServer, **options: Any) -> None:
        one = attachments([Upstream(server.url)], "w")
        await AttachedWorkers(settings_of(**options), NOTHING, NOTHING, one, CollectorRegistry()).run()

    for flavor in ("vllm", "sglang"):
        async with OpenAiServer(flavor=flavor) as server:
            with pytest.raises(ConfigError, match=DIFFERS) as error:
                await attach(server, model=str(changed))
            assert re.search(r"'10 plus .* has \d+ tokens .* but \d+ tokens .*; start all .* or", str(error.value))
            with pytest.raises(LookupError):
                await attach(server, model=str(DEFAULT_MODEL))
            assert "tokenizer" not in caplog.text
            with pytest.raises(LookupError):
                await attach(server, model=str(changed), options={"allow_tokenizer_mismatch": True})
            assert re.search(DIFFERS, caplog.text)
        caplog.clear()
    async with OpenAiServer(flavor="plain") as server:
        with pytest.raises(LookupError):
            await attach(server, model=str(changed))
    assert "does not offer its tokenizer" in caplog.text


async def test_a_process_that_waits_for_its_server_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    class LostWorker:
        life = SimpleNamespace(state=State.DEREGISTERED)

        async def run(self) -> None:
            raise LOST

    async def returned(value: Any) -> Any:
        return value

    info = ServerInfo(kind="vllm", model="m", root=str(DEFAULT_MODEL))
    monkeypatch.setattr(attached_module, "described", lambda *_: returned(info))
    monkeypatch.setattr(AttachedEngine, "check_tokenizer", lambda _: returned(None))
    monkeypatch.setattr(attached_module, "stored_card", lambda *_: returned(""))
    monkeypatch.setattr(attached_module, "join_group", lambda *_: returned(0))
    monkeypatch.setattr(attached_module, "Worker", lambda *_, **__: LostWorker())
    one = attachments([Upstream(URL)], "w")[0]
    fleet = AttachedWorkers(settings_of(), NOTHING, NOTHING, [one], CollectorRegistry())
    with pytest.raises(EngineError):
        await fleet.attach(one)
    assert (one.worker, one.model, one.probes.live()[0], one.probes.ready()[0]) == (None, "m", True, False)


@pytest.mark.asyncio
async def test_a_worker_says_what_it_waits_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log, probes = SqliteLog.open(tmp_path / "log.db"), Probes()
    worker: Any = SimpleNamespace(life=SimpleNamespace(state=State.CREATED), spec=SimpleNamespace(kv_layout=None))
    beat = RouterHeartbeat(group="m", router_id="r", role="owner", owner_epoch=1)
    rejected = msgspec.structs.replace(beat, rejected=(RejectedWorker(worker_id="w", reason="too small"),))

    async def reported(text: str, beat: RouterHeartbeat | None = None) -> None:
        while probes.waits_for != text:
            if beat is not None:
                await log.append([Draft(HEARTBEATS.name, 0, encode(HEARTBEATS, beat))])
            await asyncio.sleep(0)

    placed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    spec: Any = SimpleNamespace(worker_id="w", model="m")
    waiting = asyncio.create_task(report_waits(log, probes, spec, placed, check_s=0.0))
    await reported("no router has placed its model; start `forebay router` with the same --namespace and --redis")
    probes.refusal = "the model m gets no control partition"
    await reported(probes.refusal)
    probes.refusal = None
    probes.worker = worker
    await reported("")  # its engine starts
    worker.life.state = State.REGISTERED
    placed.set_result(0)
    await reported("no router owns its model; start `forebay router`, or read the logs of the routers")
    await reported("the router r has not admitted it; check that both use the same --redis", beat)
    await reported("the router r rejected it: too small", rejected)
    assert probes.ready() == (False, "registered: the router r rejected it: too small")
    worker.life.state = State.HEALTHY
    assert probes.ready() == (True, "healthy")
    await reported("")
    waiting.cancel()
    log.close()
    assert "forebay: worker w waits, and keeps trying: the router r rejected it: too small\n" in capfd.readouterr().err


PATIENCE_S = 60.0
ENGINE = """
from forebay.workers.service import endpoint, service

@service(namespace="test", workers=2, resources=RESOURCES)
class Engine:
    @endpoint()
    async def generate(self, request):
        yield 1
"""


def made(name: str, **options: Any) -> Service:
    class Engine:
        @endpoint()
        async def generate(self, request: Request):  # type: ignore[no-untyped-def]
            yield 1

    Engine.__module__ = f"tests.{name}"
    found = service_of(service(namespace="test", **options)(Engine))
    assert found is not None
    return found


def test_each_process_has_its_own_id_port_threads_and_gpus() -> None:
    found = shares(made("all", resources={"cpu": "1.5", "gpu": 2}), 2, "host-7", 9000, ["4", "5", "GPU-uuid", "7", "8"])
    assert [share.worker_id for share in found] == ["host-7-0", "host-7-1"]
    assert [share.options for share in found] == [
        ("--id", "host-7-0", "--metrics-port", "9000"),
        ("--id", "host-7-1", "--metrics-port", "9001"),
    ]
    assert [share.environment for share in found] == [
        {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "4,5"},
        {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "GPU-uuid,7"},
    ]


@pytest.mark.parametrize(
    ("visible", "nodes", "found"),
    [
        ("0, 2", 8, ["0", "2"]),
        ("GPU-a,GPU-b", 0, ["GPU-a", "GPU-b"]),
        ("", 8, []),
        (None, 3, ["0", "1", "2"]),
        (None, 0, []),
    ],
)
def test_gpus_default_to_visible_or_all_devices(
    tmp_path: Path, visible: str | None, nodes: int, found: list[str]
) -> None:
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(nodes))):
        (tmp_path / name).touch()
    assert devices({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == found


def test_too_few_gpus_or_ports_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"test\.engine: 3 workers with 2 GPUs each need 6, and 5 are visible"):
        shares(made("gpus", resources={"gpu": 2}), 3, "w", None, list("01234"))
    with pytest.raises(ConfigError, match="--metrics-port 65535: 2 workers need ports above the maximum of 65535"):
        shares(made("ports"), 2, "w", 65_535, [])


def engine(folder: Path, resources: str = "None") -> str:
    file = folder / "engine.py"
    file.write_text(ENGINE.replace("RESOURCES", resources))
    return f"{file}:Engine"


def serve(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return fork_server.run("serve", *arguments, environment={**os.environ, **environment}, timeout_s=PATIENCE_S)


def test_a_service_that_cannot_start_gives_the_reason(tmp_path: Path) -> None:
    run = serve(engine(tmp_path, '{"gpu": 1}'), CUDA_VISIBLE_DEVICES="0")
    assert (run.returncode, run.stdout) == (2, "")
    assert "test.engine: 2 workers with 1 GPUs each need 2, and 1 are visible" in run.stderr
    run = serve("nowhere.py:Engine")
    assert (run.returncode, run.stderr) == (2, "forebay: nowhere.py: no such file\n")


@pytest.mark.slow
def test_the_exit_code_is_the_highest_of_the_processes(tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_ports(1)}"
    run = serve(engine(tmp_path), "--id", "w", "--kafka", nobody)
    assert run.returncode == 2
    ended = [line for line in run.stderr.splitlines() if line.startswith("forebay: worker w-")]
    assert sorted(ended) == [f"forebay: worker w-{number} ended with code 2" for number in range(2)]
    # Each worker rejects an unknown option.
    assert "unknown option '--nonsense'" in serve(engine(tmp_path), "--nonsense").stderr


@contextmanager
def silent_broker() -> Iterator[socket.socket]:
    """Accept connections and never respond, so that clients wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process(tmp_path: Path, number: signal.Signals) -> None:
    with silent_broker() as broker:
        address = f"127.0.0.1:{broker.getsockname()[1]}"
        process = fork_server.start("serve", engine(tmp_path), "--id", "w", "--kafka", address, stderr=subprocess.PIPE)
        connections = [broker.accept()[0] for _ in range(2)]
        process.send_signal(number)
        _, output = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, output) == (0, "")
        for connection in connections:
            connection.settimeout(PATIENCE_S)
            while connection.recv(4096):  # until the peer process has ended
                pass
            connection.close()


async def test_a_process_starting_during_the_signal_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    start = asyncio.create_subprocess_exec

    async def start_during_signal(*_: str, **__: Any) -> asyncio.subprocess.Process:
        os.kill(os.getpid(), signal.SIGTERM)
        # Several iterations of the event loop; the signal arrives in the first.
        return await start(sys.executable, "-c", "import time; time.sleep(999)")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_during_signal)
    async with asyncio.timeout(PATIENCE_S):
        assert await run_shares([Share("w-0", (), {}), Share("w-1", (), {})], []) == 0


def test_the_processes_end_if_the_command_is_killed(tmp_path: Path) -> None:
    with silent_broker() as broker:
        address = f"127.0.0.1:{broker.getsockname()[1]}"
        process = fork_server.start("serve", engine(tmp_path), "--workers", "1", "--kafka", address)
        connection = broker.accept()[0]
        process.kill()
        process.communicate()
        connection.settimeout(PATIENCE_S)
        ends_s = time.monotonic() + PATIENCE_S
        while connection.recv(4096):
            assert time.monotonic() < ends_s
        connection.close()
