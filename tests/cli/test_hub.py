"""`--model ORG/NAME`: models of a stand-in for the Hugging Face Hub, its cache, and errors."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session, snapshot_download

from forebay.ingress.model import DEFAULT_MODEL
from tests.cli.up import running
from tests.harness import fork_server
from tests.harness.hub_stub import COMMIT, RESTRICTED, HubStub, hub_stub
from tests.harness.local import free_ports

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


@pytest.mark.parametrize("command", ["up", "worker", "ingress"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["org/none"], "no such directory org/none, and {url} has no model org/none, or it is private: check the name"),
        ([RESTRICTED], "access to {url}/org/restricted is restricted: accept its terms there, and set HF_TOKEN"),
        ([MODEL, "--revision", "v9"], "the model org/tiny at {url} has no branch, tag or commit v9"),
        (["tiny"], "no such directory tiny; expected a directory, or ORG/NAME for a model on the Hugging Face Hub"),
        ([".", "--revision", "v9"], "--revision v9 requires --model ORG/NAME, a model on the Hugging Face Hub"),
    ],
)
def test_an_unusable_model_is_reported_in_one_line(
    hub: HubStub, command: str, options: list[str], message: str
) -> None:
    run = fork_server.run(command, "--model", *options, timeout_s=60)
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
    [("{url}", "501 "), ("socks5://127.0.0.1:1", "Using SOCKS proxy, but"), ("a://b", "Unknown scheme")],
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
        ({"tokenizer.json"}, (), "config.json"),
        (TOKENIZER, ("--engine", "echo.py:Echo"), "weights"),
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


def test_a_model_of_the_hub_may_lack_a_configuration(hub: HubStub) -> None:
    hub.files = {name: content for name, content in TOKENIZER.items() if name != "config.json"}
    assert served("--model", MODEL) == (MODEL, 3)
