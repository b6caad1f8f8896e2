"""Models of `forebay up`: several in one system, models of a stand-in for the Hugging Face Hub, and stored cards."""

import asyncio
import json
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import close_session, snapshot_download

from forebay.events.models import ModelCard
from forebay.ingress.model import DEFAULT_MODEL
from forebay.ingress.model_cards import read_card
from forebay.processes import card_keeper
from forebay.processes.card_keeper import keep_card
from forebay.transport.base import Log
from forebay.transport.models import ModelStore, stored_card
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import error_of, forebay, json_of
from tests.cli.up import ADMIN_TOKEN, Up, running
from tests.harness import fork_server
from tests.harness.local import free_ports
from tests.harness.stub_servers import COMMIT, RESTRICTED, HubStub, hub_stub

pytestmark = pytest.mark.timeout(180)

CONTEXT_TOKENS = 700  # of beta


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two models of the same tokenizer and different context lengths."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("alpha", "beta"):
        shutil.copytree(DEFAULT_MODEL, folder / name)
    config = json.loads((folder / "beta" / "config.json").read_text())
    (folder / "beta" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT_TOKENS}))
    (folder / "empty").mkdir()
    return folder


def rejected(*options: str) -> str:
    """Return the error of a start."""
    run = forebay("up", "--port", free_ports(1), *options)
    assert run.returncode == 2, run.stderr
    return run.stderr


def configured(folder: Path, text: str) -> str:
    path = folder / "forebay.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model-name", "x"], "--model-name x cannot apply to 2 models; set model-name in a [[models]] table"),
        (["--lora", "a", "--lora", "b"], "--lora a, b cannot apply to 2 models"),
        (["--model", "{folder}/alpha/../beta"], "both serve the name beta; set model-name or lora in"),
        (["--model", "/nowhere"], "--model /nowhere: no such directory"),
        (["--model", "{folder}/empty"], "empty"),
        (["--workers", "1024", "--dp-size", "3"], "the workers of 2 models have 6144 ranks; the maximum is 4096"),
        (["--tool-call-parser", "hermez"], "--tool-call-parser: unknown parser 'hermez'; did you mean hermes?"),
    ],
)
def test_invalid_options_of_several_models(folder: Path, options: list[str], message: str) -> None:
    given = [one.format(folder=folder) for one in options]
    assert message in rejected("--model", str(folder / "alpha"), "--model", str(folder / "beta"), *given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[models]]\nmdel = "a"', "[[models]] table 1: unknown key 'mdel'; did you mean model?"),
        ('[[models]]\nmodel = ["a", "b"]', "[[models]] table 1: model: expected a string"),
        ("[[models]]\nworkers = 0", "workers: expected a number greater than or equal to 1, got 0"),
        ('[[models]]\nengine = "no"', "[[models]] table 1: --engine: unknown engine 'no'"),
        ('[[models]]\n[[models]]\nlora = ["forebay-default"]\nmodel-name = "x"', "both serve the name"),
        ('model = "a"\n[[models]]', "the key model and [[models]] exclude each other"),
        ("models = 3", "models: expected an array of tables, each with the heading [[models]]"),
    ],
)
def test_invalid_tables_of_models_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    assert message in rejected("--config", configured(tmp_path, text))


def test_tables_belong_to_up_and_are_shown(tmp_path: Path) -> None:
    config = configured(tmp_path, '[[models]]\nmodel = "a"\nworkers = 1\n[[models]]\nmodel = "b"\n')
    shown = forebay("config", "up", "--json", "--config", config)
    models = json.loads(shown.stdout)["models"]
    assert models == {"value": [{"model": "a", "workers": 1}, {"model": "b"}], "source": f"file {config}"}
    assert "[[models]]" in forebay("config", "up", "--config", config).stdout
    overridden = forebay("config", "up", "--json", "--config", config, "--model", "c")
    found = json.loads(overridden.stdout)
    assert ("models" in found, found["model"]["value"]) == (False, ["c"])
    worker = forebay("config", "worker", "--json", "--config", config)
    assert (worker.returncode, "models" in json.loads(worker.stdout)) == (0, False)


def chat(model: str, text: str = "hello") -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}


def tables(folder: Path) -> str:
    """Return the path of a file with tables of both models."""
    return configured(
        folder,
        f"""
[[models]]
model = "{folder}/alpha"
workers = 2
[[models]]
model = "{folder}/beta"
model-name = "org/beta"
workers = 1
block-size = 16
lora = "legal"
""",
    )


@pytest.fixture(scope="module")
def system(folder: Path) -> Iterator[tuple[Up, Path]]:
    log = folder / "log.db"
    with running("--log", str(log), "--config", tables(folder), "--admin-api") as up:
        banner = up.banner()
        assert "model alpha, 2 mock workers" in banner
        assert "model org/beta, 1 mock worker," in banner
        yield up, log


@pytest.fixture
def client(system: tuple[Up, Path]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=system[0].url, timeout=60) as client:
        yield client


def listed_models(client: httpx.Client) -> dict[str, int]:
    return {card["id"]: card["max_model_len"] for card in client.get("/v1/models").json()["data"]}


def test_requests_name_their_model(client: httpx.Client) -> None:
    # On a busy machine, a worker may be suspect for a moment, and its model is not listed meanwhile.
    while (listed := listed_models(client)).keys() != {"alpha", "org/beta", "legal"}:
        assert listed.keys() < {"alpha", "org/beta", "legal"}
    assert listed["org/beta"] == listed["legal"] == CONTEXT_TOKENS < listed["alpha"]
    for model, workers in (("alpha", {"mock-0", "mock-1"}), ("org/beta", {"mock-2"}), ("legal", {"mock-2"})):
        response = client.post("/v1/chat/completions", json=chat(model))
        assert response.status_code == 200, response.text
        assert response.json()["model"] == model
        assert response.json()["forebay"]["worker"] in workers
    explained = f"/v1/requests/{response.json()['id']}/explain"  # the requests of all models are searched
    assert client.get(explained).json()["submitted"]["model"] == "org/beta"
    assert client.get(explained, params={"model": "alpha"}).status_code == 404
    long = "word " * (CONTEXT_TOKENS + 50)
    assert client.post("/v1/chat/completions", json=chat("org/beta", long)).status_code == 400
    assert client.post("/v1/chat/completions", json=chat("alpha", long)).status_code == 200
    unknown = client.post("/v1/chat/completions", json=chat("gamma"))
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "alpha, org/beta, legal" in unknown.text


def test_routes_about_one_model_need_its_name(system: tuple[Up, Path], client: httpx.Client) -> None:
    up, log = system
    required = client.get("/v1/status").json()["error"]
    assert required["code"] == "model_required"
    status = client.get("/v1/status", params={"model": "org/beta"}).json()
    assert ([one["worker_id"] for one in status["workers"]], status["owner"]["alive"]) == (["mock-2"], True)
    profile = "profile", "run", "--url", up.url, "--out", "profile.json"
    assert error_of(*profile) == f"{up.url} serves several models; name one with --model: alpha, org/beta"
    assert "2 ready workers (mock-0, mock-1) of the model alpha" in error_of(*profile, "--model", "alpha")
    for where in (["--url", up.url], [log]):  # the models in a table
        shown = forebay("status", *where)
        rows = [line.split()[:4] for line in shown.stdout.splitlines()]
        assert rows[:3] == [
            ["model", "workers", "active", "queued"],
            ["alpha", "2", "0", "0"],
            ["org/beta", "1", "0", "0"],
        ]
        assert (shown.returncode, "--group MODEL` shows" in shown.stdout) == (0, True)
        listed = forebay("status", *where, "--json").stdout.splitlines()
        assert [json.loads(line)["group"] for line in listed] == ["alpha", "org/beta"]
    shown = forebay("status", "--url", up.url, "--group", "alpha", "--json")
    assert json.loads(shown.stdout)["group"] == "alpha"
    shown = forebay("status", log, "--group", "org/beta", "--json")
    assert json.loads(shown.stdout)["ready"]


def test_control_names_the_model(system: tuple[Up, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    up, _ = system
    monkeypatch.setenv("FOREBAY_ADMIN_TOKEN", ADMIN_TOKEN)
    missing = "name a model, as in ?model=NAME; models are: alpha, org/beta; pass --model NAME"
    for command in (["pools"], ["adapters"], ["policy"], ["policy", "default", "round-robin"]):
        run = forebay("control", *command, "--url", up.url)
        assert (run.returncode, run.stderr) == (2, f"forebay: {missing}\n")
    run = forebay("control", "adapters", "--url", up.url, "--model", "alpha", "--json")
    assert [one["worker_id"] for one in json.loads(run.stdout)["outcomes"]] == ["mock-0", "mock-1"]
    run = forebay("control", "policy", "default", "round-robin", "--url", up.url, "--model", "org/beta", "--json")
    assert (run.returncode, json.loads(run.stdout)["pools"][0]["policy"]) == (0, "round-robin")
    run = forebay("control", "pools", "--url", up.url, "--model", "alpha", "--json")
    assert json.loads(run.stdout)["pools"][0]["policy"] == "kv"
    assert (
        error_of("control", "pools", "--url", up.url, "--model", "alphaa")
        == "unknown model 'alphaa'; did you mean alpha?"
    )
    assert "workers are: mock-0, mock-1" in error_of(
        "control", "power", "sleep", "--url", up.url, "--model", "alpha", "--worker", "mock-2"
    )


def require_console(url: str, model: str) -> None:
    """Check that the console shows a model, and changes it."""
    headers = {"authorization": f"Bearer {ADMIN_TOKEN}", "x-forebay-admin-token": ADMIN_TOKEN}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        while (workers := status_of(client).get("workers")) is None:
            pass
        assert {one["worker_id"] for one in workers} <= {"mock-0", "mock-1", "mock-2", "mock-3"}
        assert client.get("/v1/console").json()["group"] == status_of(client)["group"] == model
        action = {"operator": "alice", "pool": "default", "mode": "random"}
        changed = client.post("/v1/console/actions/policy", json=action)
        assert (changed.status_code, changed.json()["model"]) == (200, model), changed.text


def status_of(client: httpx.Client) -> dict[str, Any]:
    """Return the status that the console shows. Empty while it reads the log."""
    try:
        response = client.get("/v1/status")
    except httpx.TransportError:
        return {}
    found: dict[str, Any] = response.json()
    return found if found.get("workers") else {}


@pytest.mark.slow
def test_a_log_keeps_the_groups_of_all_models(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console beside the system shows the first model of each start."""
    monkeypatch.setenv("FOREBAY_CONSOLE_TOKEN", ADMIN_TOKEN)
    log, console = tmp_path / "log.db", free_ports(2)
    beside = "--console", "--console-port", str(console), "--admin-port", str(console + 1)
    alone = "--model", str(folder / "beta"), "--model-name", "org/beta", "--block-size", "16"
    starts = (["--model", str(folder / "alpha")], ["alpha"]), (["--config", tables(folder)], ["alpha", "org/beta"])
    request_id, same = "", {"x-request-id": "same"}
    for options, models in (*starts, (alone, ["org/beta"])):
        with running("--log", str(log), *options, *beside) as up:
            require_console(f"http://127.0.0.1:{console}", models[0])
            for model in models:
                response = httpx.post(f"{up.url}/v1/chat/completions", json=chat(model), headers=same)
                assert response.status_code == 200
                request_id = response.json()["id"] if model == "alpha" else request_id
            listed = [card["id"] for card in httpx.get(f"{up.url}/v1/models").json()["data"] if "parent" not in card]
            assert listed == models
            explained = httpx.get(f"{up.url}/v1/requests/{request_id}/explain", timeout=60).json()
            assert explained["submitted"]["model"] == "alpha", "also once the model has no workers"
            assert up.end(signal.SIGKILL) == -signal.SIGKILL
    for group in ("alpha", "org/beta"):
        run = forebay("verify", log, "--group", group, "--json")
        report = json.loads(run.stdout)
        assert (run.returncode, report["divergence"], report["claims"]) == (0, None, 2), run.stdout
        assert report["verified"] == report["decisions"] >= 2
    only = "reading org/beta, the only group with workers; --group selects one of: alpha, org/beta\n"
    assert forebay("verify", log).stderr == f"forebay: {only}"
    assert json_of("status", log)["others"] == ["alpha"]
    assert "others     alpha, without ready workers" in forebay("status", log).stdout
    assert json_of("explain", log, request_id)["submitted"]["model"] == "alpha"
    assert len(json_of("explain", log, "same")["others"]) == 3, "of both models"
    assert "unknown request 'no'" in error_of("explain", log, "no")
    assert "unknown request" in error_of("explain", log, request_id, "--group", "org/beta")
    recorded = tmp_path / "both.rec"
    assert forebay("record", log, str(recorded)).returncode == 0
    assert "org/beta  " in (shown := forebay("status", str(recorded)).stdout) and "alpha  " in shown, shown
    with closing(SqliteLog.open(recorded, readonly=True)) as recording:
        assert recording.recording is not None
        assert [group.name for group in recording.recording.groups] == ["alpha", "org/beta"]


MODEL = "org/tiny"
TOKENIZER = {path.name: path.read_bytes() for path in DEFAULT_MODEL.iterdir()}
WEIGHTS = {"model.safetensors": b"weights"}
SHARDS = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")
INDEX = "model.safetensors.index.json"
SHARDED = dict.fromkeys(SHARDS, b"weights") | {
    INDEX: json.dumps({"weight_map": {f"layer.{name}": name for name in SHARDS}}).encode()
}
NOT_NEEDED = {"README.md": b"#", "original/model.safetensors": b"copy", "onnx/model.onnx": b"copy", "a.bin": b"copy"}
SERVICE = """
from forebay.workers.service import endpoint, service


@service(namespace="demo")
class Echo:
    @endpoint()
    async def generate(self, request):
        yield "echo"
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    with hub_stub(MODEL, TOKENIZER | WEIGHTS | NOT_NEEDED, free_ports(1)) as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(tmp_path)
        yield stub


def served(*options: str) -> tuple[str, int]:
    """Run `forebay up` with these options and return the model's name in the API and the tokens of one response."""
    with running(*options) as up, up.client() as client:
        (model,) = client.models.list().data
        reply = client.chat.completions.create(
            model=model.id, max_tokens=3, messages=[{"role": "user", "content": "Hello"}]
        )
        assert reply.usage is not None
        return model.id, reply.usage.completion_tokens


def test_a_model_of_the_hub_is_served_without_its_weights_and_then_from_the_cache(
    hub: HubStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served("--model", MODEL) == (MODEL, 3)
    assert hub.read == TOKENIZER.keys()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    requests = hub.requests
    assert served("--model", MODEL, "--model-name", "mine") == ("mine", 3)
    assert served("--model", MODEL, "--revision", COMMIT) == (MODEL, 3)
    assert hub.requests == requests


def test_a_real_engine_gets_the_weights_but_no_copies_of_them(hub: HubStub, tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(SERVICE)
    with running("--engine", "echo.py:Echo", "--model", MODEL) as up, up.client() as client:
        assert client.models.list().data[0].id == MODEL
        assert "Fetching" not in up.banner()
    assert hub.read == TOKENIZER.keys() | WEIGHTS.keys()


def test_a_directory_is_preferred_to_a_model_of_the_hub(hub: HubStub, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / MODEL).symlink_to(DEFAULT_MODEL)
    assert served("--model", MODEL, "--model-name", "local") == ("local", 3)
    assert hub.requests == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("up org/none", "no such directory org/none, and {url} has no model org/none, or it is private"),
        (f"worker {RESTRICTED}", "access to {url}/org/restricted is restricted: accept its terms there, and"),
        (f"ingress {MODEL} --revision v9", "the model org/tiny at {url} has no branch, tag or commit v9"),
        (
            "worker tiny",
            "no such directory tiny; expected a directory, or ORG/NAME for a model on the Hugging Face Hub",
        ),
        ("up . --revision v9", "--revision v9 requires --model ORG/NAME, a model on the Hugging Face Hub"),
    ],
)
def test_an_unusable_model_is_reported_in_one_line(hub: HubStub, command: str, message: str) -> None:
    name, *options = command.split()
    run = fork_server.run(name, "--model", *options, timeout_s=60)
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1), run.stderr
    assert message.format(url=hub.url) in run.stderr


def test_an_adapter_of_the_hub_is_downloaded(hub: HubStub, tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(SERVICE)
    options = ("up", "--engine", "echo.py:Echo", "--model", str(DEFAULT_MODEL))
    run = fork_server.run(*options, "--lora", f"a={MODEL}", "--lora", "b=org/none", timeout_s=60)
    assert (run.returncode, WEIGHTS.keys() <= hub.read) == (2, True)
    assert f"--lora b=org/none: no such directory org/none, and {hub.url} has no model org/none" in run.stderr


@pytest.mark.usefixtures("hub")
def test_a_model_that_is_not_cached_needs_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = tmp_path / "cache/hub"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = fork_server.run("up", "--model", MODEL, timeout_s=60)
    assert run.stderr.endswith(f"org/tiny is not in the cache {cache}, and HF_HUB_OFFLINE is set\n")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    url = f"http://127.0.0.1:{free_ports(1)}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    run = fork_server.run("up", "--model", MODEL, timeout_s=60)
    assert f"org/tiny is not in the cache {cache}, and {url} cannot be reached" in run.stderr
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1), run.stderr


@pytest.mark.parametrize(
    ("proxy", "reason"),
    [("{url}", "501 "), ("socks5://127.0.0.1:1", "Using SOCKS proxy, but")],
)
def test_a_proxy_that_cannot_be_used_is_reported_in_one_line(
    hub: HubStub, monkeypatch: pytest.MonkeyPatch, proxy: str, reason: str
) -> None:
    for name in ("ALL_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("HTTPS_PROXY", proxy.format(url=hub.url))  # the stub supports no CONNECT
    run = fork_server.run("up", "--model", MODEL, timeout_s=60)
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1), run.stderr
    assert f"cannot download {MODEL} from https://hub.invalid: {reason}" in run.stderr


def cache(hub: HubStub, folder: Path, names: Iterable[str]) -> None:
    """Download only these files of the model, as an interrupted download or another program does."""
    snapshot_download(MODEL, endpoint=hub.url, cache_dir=folder / "cache/hub", allow_patterns=list(names))
    close_session()


@pytest.mark.parametrize(
    ("cached", "options", "absent"),
    [
        ({"config.json"}, (), "tokenizer.json"),
        pytest.param({"tokenizer.json"}, (), "config.json", marks=pytest.mark.slow),
        pytest.param(TOKENIZER, ("--engine", "echo.py:Echo"), "weights", marks=pytest.mark.slow),
        ({*TOKENIZER, INDEX, SHARDS[0]}, ("--engine", "echo.py:Echo"), SHARDS[1]),
    ],
)
def test_a_part_of_a_model_in_the_cache_is_an_error_without_the_hub(
    hub: HubStub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cached: Iterable[str],
    options: tuple[str, ...],
    absent: str,
) -> None:
    (tmp_path / "echo.py").write_text(SERVICE)
    hub.files = TOKENIZER | SHARDED
    cache(hub, tmp_path, cached)
    part = f"the cache {tmp_path / 'cache/hub'} has only part of org/tiny (no {absent})"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = fork_server.run("up", "--model", MODEL, *options, timeout_s=60)
    assert run.returncode == 2
    assert run.stderr.endswith(f"{part}, and HF_HUB_OFFLINE is set\n")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    url = f"http://127.0.0.1:{free_ports(1)}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    run = fork_server.run("up", "--model", MODEL, *options, timeout_s=60)
    assert run.returncode == 2
    assert f"{part}, and {url} cannot be reached" in run.stderr


def test_a_cached_model_with_all_its_shards_needs_no_hub(
    hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo.py").write_text(SERVICE)
    hub.files = TOKENIZER | SHARDED | {f"consolidated{INDEX.removeprefix('model')}": b'{"weight_map": {"a": "b"}}'}
    cache(hub, tmp_path, hub.files)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with running("--engine", "echo.py:Echo", "--model", MODEL) as up, up.client() as client:
        assert client.models.list().data[0].id == MODEL


@pytest.mark.slow
def test_a_model_of_the_hub_may_lack_a_configuration(hub: HubStub) -> None:
    hub.files = {name: content for name, content in TOKENIZER.items() if name != "config.json"}
    assert served("--model", MODEL) == (MODEL, 3)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_keeper, "CHECK_S", 0.0)
    monkeypatch.setattr(card_keeper, "JITTER_S", 0.0)


async def test_a_removed_card_is_stored_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, folder = SqliteLog.open(None), tmp_path / "model"
    shutil.copytree(DEFAULT_MODEL, folder)
    digest = await stored_card(log, "m", *found_in(folder))
    other = ModelStore(log)
    await other.start()
    reading = asyncio.create_task(other.run())
    keeping = asyncio.create_task(keep_card(log, "m", digest, folder, lambda: True))
    await other.remove([digest])
    await other.stored(digest)
    assert await other.load(digest) == found_in(folder)[1]
    (folder / "config.json").write_text("{}")
    await other.remove([digest])
    await keeping
    assert f"{folder} has changed; restart the worker" in caplog.text
    reading.cancel()
    other.close()
    log.close()


async def test_a_member_removes_the_older_cards_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, folder = SqliteLog.open(None), tmp_path / "model"
    shutil.copytree(DEFAULT_MODEL, folder)
    card, files = found_in(folder)
    older = await stored_card(log, "m", card_like(card), files)
    digest = await stored_card(log, "m", card, files)

    async def in_use(_: Log, partitions: dict[str, int]) -> dict[str, str]:
        assert partitions == {}
        return {"m": digest}

    monkeypatch.setattr("forebay.transport.models.cards_in_use", in_use)
    joined = asyncio.Event()
    keeping = asyncio.create_task(keep_card(log, "m", digest, folder, joined.is_set))
    store = ModelStore(log)
    await store.start()
    assert store.cards.keys() == {older, digest}
    joined.set()
    reading = asyncio.create_task(store.run())
    await store.removed(older)
    assert store.cards.keys() == {digest}
    for task in (keeping, reading):
        task.cancel()
    await asyncio.gather(keeping, reading, return_exceptions=True)
    store.close()
    log.close()


def found_in(folder: Path) -> tuple[ModelCard, dict[str, bytes]]:
    found = read_card(folder)
    assert found is not None
    return found


def card_like(card: ModelCard) -> ModelCard:
    """Return another card with the same files."""
    return ModelCard(files=card.files, context_tokens=card.context_tokens + 1)
