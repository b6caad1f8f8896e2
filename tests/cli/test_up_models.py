"""`forebay up` with several models: their options, and both of them in one process behind one ingress."""

import json
import shutil
import signal
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from forebay.ingress.model import DEFAULT_MODEL
from forebay.transport.sqlite.log import SqliteLog
from tests.cli import in_process
from tests.cli.up import ADMIN, forebay, running
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
        ('[[models]]\nmodle = "a"', "[[models]] table 1: unknown key 'modle'; did you mean model?"),
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
    shown = in_process.forebay("config", "show", "up", "--json", "--config", config)
    models = json.loads(shown.stdout)["models"]
    assert models == {"value": [{"model": "a", "workers": 1}, {"model": "b"}], "source": f"file {config}"}
    assert "[[models]]" in in_process.forebay("config", "show", "up", "--config", config).stdout
    overridden = in_process.forebay("config", "show", "up", "--json", "--config", config, "--model", "c")
    found = json.loads(overridden.stdout)
    assert ("models" in found, found["model"]["value"]) == (False, ["c"])
    worker = in_process.forebay("config", "show", "worker", "--json", "--config", config)
    assert (worker.returncode, "models" in json.loads(worker.stdout)) == (0, False)


def chat(model: str, text: str = "hello") -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}


def test_two_models_in_one_process(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    with running("--log", str(log), "--model", str(folder / "alpha"), "--workers", "2") as up:
        assert httpx.post(f"{up.url}/v1/chat/completions", json=chat("alpha")).status_code == 200
        assert up.end(signal.SIGTERM) == 0
    tables = f"""
[[models]]
model = "{folder}/alpha"
workers = 2
[[models]]
model = "{folder}/beta"
model-name = "org/beta"
workers = 1
block-size = 16
lora = "legal"
"""
    with running("--log", str(log), "--config", configured(tmp_path, tables), "--admin-api") as up:
        banner = up.banner()
        assert "model alpha, 2 mock workers" in banner
        assert "model org/beta, 1 mock worker," in banner
        with httpx.Client(base_url=up.url, timeout=60) as client:
            listed = {card["id"]: card["max_model_len"] for card in client.get("/v1/models").json()["data"]}
            assert listed.keys() == {"alpha", "org/beta", "legal"}
            assert listed["org/beta"] == listed["legal"] == CONTEXT_TOKENS < listed["alpha"]
            for model, workers in (("alpha", {"mock-0", "mock-1"}), ("org/beta", {"mock-2"}), ("legal", {"mock-2"})):
                response = client.post("/v1/chat/completions", json=chat(model))
                assert response.status_code == 200, response.text
                assert response.json()["model"] == model
                assert response.json()["forebay"]["worker"] in workers
            long = "word " * (CONTEXT_TOKENS + 50)
            assert client.post("/v1/chat/completions", json=chat("org/beta", long)).status_code == 400
            assert client.post("/v1/chat/completions", json=chat("alpha", long)).status_code == 200
            unknown = client.post("/v1/chat/completions", json=chat("gamma"))
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
            assert "alpha, org/beta, legal" in unknown.text
            assert client.get("/v1/status").json()["error"]["code"] == "model_required"
            status = client.get("/v1/status", params={"model": "org/beta"}).json()
            assert ([one["worker_id"] for one in status["workers"]], status["owner"]["alive"]) == (["mock-2"], True)
            pools = client.get("/v1/pools", params={"model": "alpha"}, headers=ADMIN).json()
            assert [pool["pool"] for pool in pools["pools"]] == ["default"]
            explained = client.get(f"/v1/requests/{response.json()['id']}/explain", params={"model": "org/beta"})
            assert explained.status_code == 200, explained.text
        assert up.end(signal.SIGKILL) == -signal.SIGKILL
    with running(
        "--log", str(log), "--model", str(folder / "beta"), "--model-name", "org/beta", "--block-size", "16"
    ) as up:
        assert httpx.post(f"{up.url}/v1/chat/completions", json=chat("org/beta")).status_code == 200
        assert [card["id"] for card in httpx.get(f"{up.url}/v1/models").json()["data"]] == ["org/beta"]
        assert up.end(signal.SIGTERM) == 0
    for group in ("alpha", "org/beta"):
        run = in_process.forebay("replay", "verify", str(log), "--group", group, "--json")
        report = json.loads(run.stdout)
        assert (run.returncode, report["divergence"]) == (0, None), run.stdout
        assert report["verified"] == report["decisions"] >= 3
    required = forebay("replay", "verify", str(log))
    assert (required.returncode, "--group is required; groups of" in required.stderr) == (2, True)
    recorded = tmp_path / "both.rec"
    assert in_process.forebay("record", str(log), str(recorded)).returncode == 0
    with closing(SqliteLog.open(recorded, readonly=True)) as recording:
        assert recording.recording is not None
        assert [group.name for group in recording.recording.groups] == ["alpha", "org/beta"]
