"""`forebay up` with several models: their options, and both of them in one process behind one ingress."""

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.ingress.model import DEFAULT_MODEL
from forebay.transport.sqlite.log import SqliteLog
from tests.cli import in_process
from tests.cli.up import ADMIN_TOKEN, Up, running
from tests.harness.local import free_ports

CONTEXT_TOKENS = 700  # of beta

pytestmark = pytest.mark.timeout(180)


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
    run = in_process.forebay("up", "--port", str(free_ports(1)), *options)
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
        (["--revision", "v1"], "--revision v1 cannot apply to 2 models"),
        (["--lora", "a", "--lora", "b"], "--lora a, b cannot apply to 2 models"),
        (
            ["--model", "{folder}/alpha/../beta"],
            "both serve the name beta; set model-name or lora in",
        ),
        (["--model", "/nowhere"], "--model /nowhere: no such directory"),
        (["--model", "{folder}/empty"], "empty"),
        (["--workers", "1024", "--dp-size", "3"], "the workers of 2 models have 6144 ranks; the maximum is 4096"),
        (["--taint", "mock-8:a"], "unknown worker 'mock-8'; workers are: mock-0 to mock-7"),
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
        ("[[models]]\n[[models]]\nport = 1", "[[models]] table 2: unknown key 'port'"),
        ('[[models]]\nmodel = ["a", "b"]', "[[models]] table 1: model: expected a string"),
        ("[[models]]\nworkers = 0", "workers: expected a number greater than or equal to 1, got 0"),
        ('[[models]]\nengine = "no"', "[[models]] table 1: --engine: unknown engine 'no'"),
        ("[[models]]\n[[models]]", "both serve the name forebay-default"),
        ('[[models]]\n[[models]]\nlora = ["forebay-default"]\nmodel-name = "x"', "both serve the name"),
        ('model = "a"\n[[models]]', "the key model and [[models]] exclude each other"),
        ("models = 3", "models: expected an array of tables, each with the heading [[models]]"),
    ],
)
def test_invalid_tables(tmp_path: Path, text: str, message: str) -> None:
    assert message in rejected("--config", configured(tmp_path, text))


def test_tables_belong_to_up_and_are_shown(tmp_path: Path) -> None:
    config = configured(tmp_path, '[[models]]\nmodel = "a"\nworkers = 1\n[[models]]\nmodel = "b"\n')
    shown = in_process.forebay("config", "up", "--json", "--config", config)
    models = json.loads(shown.stdout)["models"]
    assert models == {"value": [{"model": "a", "workers": 1}, {"model": "b"}], "source": f"file {config}"}
    assert "[[models]]" in in_process.forebay("config", "up", "--config", config).stdout
    overridden = in_process.forebay("config", "up", "--json", "--config", config, "--model", "c")
    found = json.loads(overridden.stdout)
    assert ("models" in found, found["model"]["value"]) == (False, ["c"])
    worker = in_process.forebay("config", "worker", "--json", "--config", config)
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
    explained = client.get(f"/v1/requests/{response.json()['id']}/explain", params={"model": "org/beta"})
    assert explained.status_code == 200, explained.text
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
    shown = in_process.forebay("status", "--url", up.url, "--json")
    assert (shown.returncode, f"{required['message']}; pass --group NAME" in shown.stderr) == (2, True)
    shown = in_process.forebay("status", "--url", up.url, "--group", "alpha", "--json")
    assert json.loads(shown.stdout)["group"] == "alpha"
    shown = in_process.forebay("status", str(log), "--group", "org/beta", "--json")
    assert json.loads(shown.stdout)["ready"]


def test_control_names_the_model(system: tuple[Up, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    up, _ = system
    monkeypatch.setenv("FOREBAY_ADMIN_TOKEN", ADMIN_TOKEN)
    missing = "name a model, as in ?model=NAME; models are: alpha, org/beta; pass --model NAME"
    for command in (["pools"], ["adapters"], ["policy"], ["policy", "default", "round-robin"]):
        run = in_process.forebay("control", *command, "--url", up.url)
        assert (run.returncode, run.stderr) == (2, f"forebay: {missing}\n")
    run = in_process.forebay("control", "adapters", "--url", up.url, "--model", "alpha", "--json")
    assert [one["worker_id"] for one in json.loads(run.stdout)["outcomes"]] == ["mock-0", "mock-1"]
    run = in_process.forebay(
        "control", "policy", "default", "round-robin", "--url", up.url, "--model", "org/beta", "--json"
    )
    assert (run.returncode, json.loads(run.stdout)["pools"][0]["policy"]) == (0, "round-robin")
    run = in_process.forebay("control", "pools", "--url", up.url, "--model", "alpha", "--json")
    assert json.loads(run.stdout)["pools"][0]["policy"] == "kv"
    run = in_process.forebay("control", "pools", "--url", up.url, "--model", "alphaa")
    assert (run.returncode, run.stderr) == (2, "forebay: unknown model 'alphaa'; did you mean alpha?\n")
    run = in_process.forebay("control", "power", "sleep", "--url", up.url, "--model", "alpha", "--worker", "mock-2")
    assert (run.returncode, "workers are: mock-0, mock-1" in run.stderr) == (2, True), run.stderr


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
    log, console = tmp_path / "log.db", free_ports(1)
    beside = "--console", "--console-port", str(console), "--admin-api"
    alone = "--model", str(folder / "beta"), "--model-name", "org/beta", "--block-size", "16"
    starts = (["--model", str(folder / "alpha")], ["alpha"]), (["--config", tables(folder)], ["alpha", "org/beta"])
    for options, models in (*starts, (alone, ["org/beta"])):
        with running("--log", str(log), *options, *beside) as up:
            require_console(f"http://127.0.0.1:{console}", models[0])
            for model in models:
                assert httpx.post(f"{up.url}/v1/chat/completions", json=chat(model)).status_code == 200
            listed = [card["id"] for card in httpx.get(f"{up.url}/v1/models").json()["data"] if "parent" not in card]
            assert listed == models
            assert up.end(signal.SIGKILL) == -signal.SIGKILL
    for group in ("alpha", "org/beta"):
        run = in_process.forebay("verify", str(log), "--group", group, "--json")
        report = json.loads(run.stdout)
        assert (run.returncode, report["divergence"], report["claims"]) == (0, None, 2), run.stdout
        assert report["verified"] == report["decisions"] >= 2
    required = in_process.forebay("verify", str(log))
    assert (required.returncode, "--group is required; groups of" in required.stderr) == (2, True)
    recorded = tmp_path / "both.rec"
    assert in_process.forebay("record", str(log), str(recorded)).returncode == 0
    with closing(SqliteLog.open(recorded, readonly=True)) as recording:
        assert recording.recording is not None
        assert [group.name for group in recording.recording.groups] == ["alpha", "org/beta"]
