"""`forebay control` against a running `forebay up`, and who may send requests: API keys, TLS and addresses."""

import getpass
import json
import signal
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme
from cryptography import x509

from forebay.events.request_ids import log_id_of
from tests.cli.in_process import answering, error_of, forebay
from tests.cli.up import ADMIN, ADMIN_TOKEN, PATIENCE_S, Up, running, verified
from tests.cli.up import forebay as process
from tests.harness.local import free_ports

pytestmark = pytest.mark.timeout(180)

BLOCKS = "busy.active_decode_blocks_threshold"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the token that `Up` requires."""
    monkeypatch.setenv("FOREBAY_ADMIN_TOKEN", ADMIN_TOKEN)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Up, Path]]:
    log = tmp_path_factory.mktemp("control") / "log.db"
    with running("--log", str(log), "--workers", "2", "--admin-api") as up:
        yield up, log


def control(up: Up, *arguments: object) -> tuple[int, str, str]:
    run = forebay("control", *arguments, "--url", up.url)
    return run.returncode, run.stdout, run.stderr


def completion(up: Up, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "once upon a time", "max_tokens": 2}
    return httpx.post(f"{up.url}/v1/completions", json=body, timeout=30)


def test_an_adapter_is_loaded_used_and_unloaded(system: tuple[Up, Path], tmp_path: Path) -> None:
    up, _ = system
    assert completion(up, "sql").status_code == 404
    options = ["--lora", f"sql={tmp_path}", "--worker", "mock-1", "--url", up.url]
    run = process("control", "adapters", "load", *options)
    table = [line.split() for line in run.stdout.splitlines()]
    assert (run.returncode, table[1:]) == (0, [["mock-1", "default", "done", "sql"]])
    assert completion(up, "sql").json()["model"] == "sql"
    models = httpx.get(f"{up.url}/v1/models", timeout=30).json()["data"]
    assert [card["id"] for card in models] == ["forebay-default", "sql"]
    code, out, err = control(up, "adapters", "unload", "--lora", "sql")
    assert code == 1
    assert [line.split()[:3] for line in out.splitlines()][1:] == [
        ["mock-0", "default", "refused"],
        ["mock-1", "default", "done"],
    ]
    assert err == "forebay: 1 of 2 workers did not unload_lora: mock-0: the adapter 'sql' is not loaded; loaded: none\n"
    assert completion(up, "sql").status_code == 404


def test_every_worker_sleeps_and_wakes_up(system: tuple[Up, Path]) -> None:
    up, _ = system
    commands = {
        "sleep": ("power", "sleep"),
        "wake_up": ("power", "wake-up"),
        "pause": ("power", "pause"),
        "resume": ("power", "resume"),
        "clear_kv_blocks": ("cache", "clear"),
        "list_loras": ("adapters",),
    }
    for action, command in commands.items():
        code, out, _ = control(up, *command, "--json")
        answer = json.loads(out)
        assert (code, answer["action"]) == (0, action)
        assert [(one["worker_id"], one["status"]) for one in answer["outcomes"]] == [
            ("mock-0", "done"),
            ("mock-1", "done"),
        ]
    assert completion(up, "forebay-default").status_code == 200


def test_error_for_an_unreachable_target_gives_the_reason(system: tuple[Up, Path]) -> None:
    up, _ = system
    unknown = {
        ("--worker", "x"): "unknown worker 'x'; workers are: mock-0, mock-1",
        ("--worker", "mokc-1"): "unknown worker 'mokc-1'; did you mean mock-1?",
        ("--pool", "deflt"): "unknown pool 'deflt'; did you mean default?",
    }
    for option, error in unknown.items():
        assert control(up, "power", "pause", *option)[::2] == (2, f"forebay: {error}\n")
    for arguments, message in (
        (("adapters", "load"), "load requires --lora"),
        (("adapters", "load", "--lora", "x"), "--lora x: expected NAME=DIR"),
        (("adapters", "unload", "--lora", "x=x"), "--lora x=x: expected NAME=DIR or NAME=URI to load an adapter, NAME"),
        (("power", "pause", "--lora", "x"), "unknown option '--lora'"),
        (("power", "wake-up", "--level", "2"), "--level requires sleep"),
        (("policy", "--set", "disagg.policy=never", "--set", f"{BLOCKS}=0.9"), "with two commands"),
        (("policy", "--set", "disag.policy=never"), "unknown setting 'disag.policy'; did you mean disagg.policy?"),
        (("pools", "--pool-routing", "x", "--pool", "p", "--base", "b", "--share", "1"), "with two commands"),
        (("power", "dream"), "unknown value 'dream'; values are: sleep, wake-up, pause, resume"),
    ):
        code, out, err = control(up, *arguments)
        assert (code, out) == (2, "")
        assert message in err


def settings(text: str) -> dict[str, list[str]]:
    """Return the rows of a table of settings, including its header, by their first cell."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:]}


def test_busy_thresholds_are_shown_and_changed(system: tuple[Up, Path]) -> None:
    up, _ = system
    code, out, _ = control(up, "policy", "--set", f"{BLOCKS}=0.9")
    assert (code, out.splitlines()[0]) == (0, "model forebay-default")
    off = ["none", "none"]
    assert settings(out) == {
        "setting": ["before", "now"],
        "active_decode_blocks_threshold": ["none", "0.9"],
        "active_prefill_tokens_threshold": off,
        "active_prefill_tokens_threshold_frac": off,
    }
    _, out, _ = control(up, "policy")
    assert settings(out)["active_decode_blocks_threshold"] == ["0.9"]
    code, out, _ = control(up, "policy", "--set", f"{BLOCKS}=none", "--json")
    report = json.loads(out)
    assert code == 0
    assert [report[when]["active_decode_blocks_threshold"] for when in ("before", "now")] == [0.9, None]


def test_disaggregation_cannot_be_set_without_prefill_and_decode_pools(system: tuple[Up, Path]) -> None:
    up, _ = system
    code, out, err = control(up, "policy", "--set", "disagg.policy=never")
    assert (code, out) == (1, "")
    assert err == "forebay: forebay-default is not disaggregated: it has no decode pool\n"


def test_disagg_is_shown_and_changed_and_invalid_changes_are_rejected() -> None:
    with running("--prefill-workers", "1", "--decode-workers", "1", "--admin-api") as up:
        code, out, _ = control(up, "policy")
        assert (code, out.splitlines()[0]) == (0, "model forebay-default, pool decode")
        shown = settings(out)
        assert (shown["setting"], shown["policy"], shown["enforce"]) == (["now"], ["always"], ["false"])
        given = ("policy=classic", "enforce=true", "max_local_prefill_length=512", "prefill_busy_threshold=none")
        changes = [part for one in given for part in ("--set", f"disagg.{one}")]
        code, out, _ = control(up, "policy", *changes)
        changed = {name: cells for name, cells in settings(out).items() if cells[0] != cells[1]}
        assert code == 0
        assert changed == {
            "setting": ["before", "now"],
            "policy": ["always", "classic"],
            "max_local_prefill_length": ["1000", "512"],
            "prefill_busy_threshold": ["1.0", "none"],
            "enforce": ["false", "true"],
        }
        code, out, err = control(up, "policy", "--set", "disagg.policy=sometimes")
        assert (code, out) == (2, "")
        assert err.startswith("forebay: policy: Input should be 'always', 'never', 'classic'")
        code, out, _ = control(up, "policy", "--set", "disagg.enforce=false", "--json")
        report = json.loads(out)
        assert (report["before"]["policy"], report["before"]["enforce"]) == ("classic", True)
        assert report["now"] == {**report["before"], "enforce": False}
        assert httpx.get(f"{up.url}/disaggregation", headers=ADMIN, timeout=30).json() == {
            "disaggregation": [report["now"]]
        }


def test_pools_are_shown_and_drained_by_name(system: tuple[Up, Path], tmp_path: Path) -> None:
    up, _ = system
    code, out, _ = control(up, "drain", "default")
    assert (code, out.splitlines()[0]) == (0, "model forebay-default")
    assert out.splitlines()[2].split() == ["default", "aggregated", "kv", "64", "none,", "drained"]
    assert completion(up, "forebay-default").json()["error"]["code"] == "no_workers"
    code, out, _ = control(up, "drain", "default", "--remove", "--json")
    assert (code, json.loads(out)["pools"][0]["drained"]) == (0, False)
    assert completion(up, "forebay-default").status_code == 200
    rules = tmp_path / "rules.toml"
    rules.write_text('[[models]]\nname = "forebay-other"\n')
    for arguments, expected, message in (
        (("drain", "deflt"), 2, "unknown pool 'deflt'; did you mean default?"),
        (("pools", "--pool", "default", "--base", "x", "--share", "0.1"), 2, "unknown pool 'x'; pools are: default"),
        (("pools", "--pool", "default"), 2, "--base and --share are required, or --remove to end the canary"),
        (
            ("pools", "--pool", "default", "--remove", "--share", "1"),
            2,
            "--remove cannot be combined with --base and --share",
        ),
        (("pools", "--remove"), 2, "--base, --share and --remove require --pool POOL"),
        (("policy", "default"), 2, "expected POOL and MODE without other settings"),
        (
            ("pools", "--pool-routing", str(rules)),
            2,
            f"{rules}: unknown model 'forebay-default'; models are: forebay-other",
        ),
    ):
        assert control(up, *arguments)[::2] == (expected, f"forebay: {message}\n")


def test_the_policy_of_a_pool_is_changed_with_the_operators_name(system: tuple[Up, Path]) -> None:
    up, log = system
    code, out, _ = control(up, "policy", "default", "round-robin", "--operator", "alice")
    assert (code, out.splitlines()[2].split()[:3]) == (0, ["default", "aggregated", "round-robin"])
    assert completion(up, "forebay-default").status_code == 200
    code, out, _ = control(up, "policy", "default", "kv", "--json")
    assert (code, json.loads(out)["pools"][0]["policy"]) == (0, "kv")
    changes = on_topic(log, "control", "control.policy_set")
    assert [(one["mode"], one["operator"]) for one in changes] == [("round-robin", "alice"), ("kv", getpass.getuser())]
    assert on_topic(log, "decisions", "request.routed")[-1]["mode"] == "round-robin"
    for arguments, message in (
        (("deflt", "kv"), "unknown pool 'deflt'; did you mean default?"),
        (("default", "roundrobin"), "unknown policy 'roundrobin'; did you mean round-robin?"),
        (("default", "kv", "--operator", "x" * 257), "--operator: expected at most 256 printable characters, got "),
    ):
        code, _, err = control(up, "policy", *arguments)
        assert code == 2
        assert err.startswith(f"forebay: {message}")


@pytest.mark.slow
def test_a_worker_drains_and_the_other_one_serves(tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    with running("--log", str(log), "--workers", "2", "--admin-api") as up:
        code, _, err = control(up, "drain")
        assert (code, err) == (
            2,
            "forebay: expected POOL, POOL --remove, POOL --leave or --worker WORKER; drained workers end\n",
        )
        code, out, _ = control(up, "drain", "--worker", "mock-0", "--operator", "alice", "--json")
        (outcome,) = json.loads(out)["outcomes"]
        assert (code, outcome["worker_id"], outcome["status"], outcome["message"]) == (0, "mock-0", "done", None)
        wait_for_workers(up, ["mock-1"])
        assert completion(up, "forebay-default").status_code == 200
        code, out, _ = control(up, "drain", "default", "--leave")
        assert (code, out.splitlines()[1].split()[:3]) == (0, ["mock-1", "default", "done"])
        assert "it was the last ready worker of its pool" in out
        wait_for_workers(up, [])
        assert completion(up, "forebay-default").json()["error"]["code"] == "no_workers"
    commands = on_topic(log, "control", "control.worker_commanded")
    assert [one["operator"] for one in commands] == ["alice", getpass.getuser()]
    drained = on_topic(log, "fleet", "fleet.worker_draining")
    assert [one["worker_id"] for one in drained] == ["mock-0", "mock-1"]
    assert verified(log)["decisions"]


def wait_for_workers(up: Up, names: list[str]) -> None:
    """Wait until the system has exactly these workers."""
    ends_s = time.monotonic() + PATIENCE_S
    found: list[str] | None = None
    while found != names:
        assert time.monotonic() < ends_s, found
        time.sleep(0.05)
        status = httpx.get(f"{up.url}/v1/status", timeout=30).json()
        found = [worker["worker_id"] for worker in status["workers"]]


def on_topic(log: Path, topic: str, tag: str) -> list[dict[str, Any]]:
    run = forebay("topics", "tail", log, topic, "-n", "1000")
    assert run.returncode == 0, run.stderr
    events = [json.loads(line)["event"] for line in run.stdout.splitlines()]
    return [event for event in events if event["type"] == tag]


GRID = """
[[models]]
name = "forebay-default"
retry = true
[[models.grids]]
target = "itl"
isl_max = 3000
target_min_ms = 10
target_max_ms = 50
pools = [{ pool = "default", priority = 0 }]
cells = [["default", "default"], ["default", "default"], ["default", "default"]]
overrides = [{ min_priority = 5, max_priority = 9, pool = "default" }]
"""


def test_the_grid_of_pools_is_shown_as_a_table(system: tuple[Up, Path], tmp_path: Path) -> None:
    up, _ = system
    rules = tmp_path / "rules.toml"
    rules.write_text(GRID)
    code, out, _ = control(up, "pools", "--pool-routing", rules)
    assert code == 0
    assert [line.split("  ")[0].strip() for line in out.splitlines()[4:]] == [
        "grid of aggregated pools; pools by speed (lower is faster): default (0)",
        "prompt tokens",
        "below 1000",
        "1000 to 2000",
        "from 2000",
        "requests with a priority from 5 to 9 go to default",
        "failed requests move to faster pools",
    ]
    assert "ITL below 30 ms" in out
    assert "ITL from 30 ms" in out
    rules.write_text(GRID.partition("[[models.grids]]")[0].replace("true", "false"))
    assert control(up, "pools", "--pool-routing", rules)[0] == 0
    assert len(control(up, "pools")[1].splitlines()) == 3, "no grid is left"


def test_the_admin_api_is_disabled_by_default() -> None:
    with running("--workers", "1") as up:
        answers = [control(up, *names) for names in (("power", "pause"), ("policy",), ("pools",))]
    message = f"forebay: {up.url} has no admin API; start the ingress with --admin-api, or use its --admin-port\n"
    assert [(code, err) for code, _, err in answers] == [(1, message)] * 3


def test_the_admin_api_has_a_port_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports(1)
    options = ("--log", str(tmp_path / "log.db"), "--workers", "2", "--admin-port", str(port), "--api-key", KEY)
    up, admin = Up(*options), f"http://127.0.0.1:{port}"
    try:
        up.wait_ready()
        assert f"admin API on {admin}\n" in up.banner()
        taken = process("up", "--port", str(free_ports(1)), "--admin-port", str(port))
        assert (taken.returncode, "choose another --admin-port" in taken.stderr) == (2, True), taken.stderr
        for key in (KEY, ADMIN_TOKEN):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.post(f"{up.url}/pause", headers=headers, timeout=30).status_code == httpx.codes.NOT_FOUND
        with_key = httpx.post(f"{admin}/pause", headers={"authorization": f"Bearer {KEY}"}, timeout=30)
        assert with_key.json()["error"]["code"] == "admin_token_wrong"
        assert "has no admin API" in error_of("control", "power", "pause", "--url", up.url, code=1)
        assert forebay("control", "policy", "--set", f"{BLOCKS}=0.9", "--url", admin).returncode == 0
        assert forebay("control", "pools", "--url", admin).returncode == 0
        token = tmp_path / "token"
        token.write_text("guess")
        assert "set FOREBAY_ADMIN_TOKEN or --token-file" in error_of("status", "--url", admin, "--token-file", token)
        monkeypatch.setenv("FOREBAY_API_KEY", KEY)
        for url in (up.url, admin):
            assert forebay("status", "--url", url).returncode == 0, url
        monkeypatch.delenv("FOREBAY_API_KEY")
        monkeypatch.delenv("FOREBAY_ADMIN_TOKEN")
        assert "set FOREBAY_ADMIN_TOKEN or --token-file" in error_of("status", "--url", admin)
    finally:
        assert up.end(signal.SIGINT) == 0


def test_commands_need_the_token_of_the_ingress(
    system: tuple[Up, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up, _ = system
    monkeypatch.setenv("FOREBAY_ADMIN_TOKEN", "another")
    code, _, err = control(up, "power", "pause")
    assert (code, err) == (
        2,
        "forebay: the admin token is wrong; send the token that the ingress was started with; "
        "set FOREBAY_ADMIN_TOKEN or --token-file\n",
    )
    monkeypatch.delenv("FOREBAY_ADMIN_TOKEN")
    assert control(up, "policy")[::2][0] == 2
    token = tmp_path / "token"
    token.write_text(f"{ADMIN_TOKEN}\n")
    assert control(up, "adapters", "--token-file", token)[0] == 0
    token.write_text("two words")
    code, _, err = control(up, "adapters", "--token-file", token)
    assert (code, "visible ASCII" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--admin-api",), "the admin API requires a token; set FOREBAY_ADMIN_TOKEN or use --token-file FILE"),
        (("--admin-port", "9"), "the admin API requires a token; set FOREBAY_ADMIN_TOKEN or use --token-file FILE"),
        (("--token-file", "x"), "--token-file requires --admin-api or --admin-port"),
        (("--admin-api", "--token-file", "/none"), "cannot read --token-file /none"),
        (("--admin-api", "--token-file", "/dev/null"), "--token-file /dev/null is empty"),
        (("--allow-host", "http://name:80"), "--allow-host 'http://name:80': give a host name"),
    ],
)
@pytest.mark.parametrize("command", ["up", "ingress"])
def test_an_ingress_with_an_incomplete_admin_configuration_does_not_start(
    command: str, options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOREBAY_ADMIN_TOKEN")
    run = forebay(command, "--port", free_ports(1), *options)
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1)
    assert run.stderr.startswith(f"forebay: {message}")


def test_error_names_an_unreachable_ingress() -> None:
    url = f"http://127.0.0.1:{free_ports(1)}"
    assert f"{url} does not respond" in error_of("control", "adapters", "--url", url)
    assert "does not respond" in forebay("control", "adapters", "--url", "nonsense").stderr


def test_error_names_a_server_other_than_an_ingress() -> None:
    with answering(200, "hello") as url:
        runs = [forebay("control", name, "--url", url) for name in ("adapters", "policy")]
    message = f"forebay: {url} is not an ingress (unexpected response, HTTP 200); check --url\n"
    assert [(run.returncode, run.stderr) for run in runs] == [(2, message)] * 2


KEY = "a-key-of-this-test"
SECRET = "not=a+secret of anybody"


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


def issue(authority: trustme.CA, folder: Path, name: str = "127.0.0.1", not_after: datetime | None = None) -> int:
    """Write a new certificate and its key, and return its number."""
    issued = authority.issue_cert(name, key_type=trustme.KeyType.ECDSA, not_after=not_after)
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return x509.load_pem_x509_certificate(issued.cert_chain_pems[0].bytes()).serial_number


@pytest.fixture
def certificate(authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the options that serve HTTPS; clients of this process trust the certificate."""
    issue(authority, tmp_path)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return ["--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem")]


def test_a_key_and_a_certificate_protect_a_system(
    certificate: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, log = tmp_path / "keys", tmp_path / "log.db"
    keys.write_text(f"another-key\n\n{KEY}\n")
    up = Up("--log", str(log), "--workers", "1", "--admin-api", "--api-key-file", str(keys), *certificate)
    up.url = up.url.replace("http:", "https:")
    try:
        up.wait_ready()
        assert f"OpenAI API on {up.url}/v1" in up.banner()
        assert httpx.get(f"{up.url}/metrics", timeout=PATIENCE_S).status_code == httpx.codes.OK
        with pytest.raises(openai.AuthenticationError):
            up.client().models.list()
        client = openai.OpenAI(base_url=f"{up.url}/v1", api_key=KEY, max_retries=0)
        answer = client.completions.create(model="forebay-default", prompt="once", max_tokens=2)
        explained = httpx.get(
            f"{up.url}/v1/requests/{answer.id}/explain", headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S
        )
        assert explained.json()["request_id"] == log_id_of(answer.id)
        trace = ["trace", "synthetic:requests=3,rate=50,prompt=100,output=3", "--url", up.url, "--json"]
        assert "the API key is missing or wrong; set FOREBAY_API_KEY or --api-key" in error_of(*trace)
        plain = up.url.replace("https:", "http:")
        assert "a system with a certificate serves only https" in error_of(
            "trace", "synthetic:requests=1", "--url", plain
        )
        with monkeypatch.context() as untrusted:
            untrusted.delenv("SSL_CERT_FILE")
            for command in (trace, ["control", "adapters", "--url", up.url]):
                assert "set SSL_CERT_FILE" in error_of(*command)
        played = forebay(*trace, "--api-key", KEY)
        assert (played.returncode, json.loads(played.stdout)["requests"]) == (0, 3)
        monkeypatch.setenv("FOREBAY_API_KEY", f"{KEY},another-key")
        assert forebay(*trace).returncode == 0
        monkeypatch.setenv("FOREBAY_ADMIN_TOKEN", "token-of-tests")
        assert forebay("control", "adapters", "--url", up.url).returncode == 0
        for child in up.children():
            assert KEY not in Path(f"/proc/{child}/cmdline").read_text()
    finally:
        up.process.send_signal(signal.SIGINT)
        output = up.process.communicate(timeout=PATIENCE_S)[0]
    assert KEY not in output
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.iterdir() if path != keys)


def test_a_renewed_certificate_is_served_and_an_unusable_one_is_reported(
    authority: trustme.CA, certificate: list[str], tmp_path: Path
) -> None:
    up = Up("--workers", "1", *certificate)
    up.url = up.url.replace("http:", "https:")
    unusable = "forebay_ingress_certificate_unusable_total"

    def served() -> int:
        pem = ssl.get_server_certificate(("127.0.0.1", up.port))
        return x509.load_pem_x509_certificate(pem.encode()).serial_number

    try:
        up.wait_ready()
        number = issue(authority, tmp_path)
        assert served() == number
        (tmp_path / "key.pem").write_text("-----BEGIN")
        assert (served(), up.metric(unusable)) == (number, 1)
        assert forebay("status", "--url", up.url).returncode == 0
        issue(authority, tmp_path, not_after=datetime.now(UTC) - timedelta(days=1))
        assert "renew the certificate of the system" in error_of("status", "--url", up.url)
        issue(authority, tmp_path, "forebay.example")
        assert "use an address of the system that its certificate names" in error_of("status", "--url", up.url)
        issue(trustme.CA(key_type=trustme.KeyType.ECDSA), tmp_path)
        assert "set SSL_CERT_FILE to the certificate of the authority" in error_of("status", "--url", up.url)
    finally:
        up.process.send_signal(signal.SIGINT)
        output = up.process.communicate(timeout=PATIENCE_S)[0]
    assert output.count("the previous certificates stay in use") == 1


@pytest.mark.parametrize("command", ["up", "ingress"])
def test_other_machines_are_served_with_a_key_or_permission_only(command: str, tmp_path: Path) -> None:
    run = forebay(command, "--host", "0.0.0.0", "--port", free_ports(1))
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1)
    assert run.stderr.startswith("forebay: --host 0.0.0.0 is not a loopback address")
    assert "--api-key" in run.stderr
    assert "--allow-anonymous" in run.stderr
    unusable = ["--log", str(tmp_path)] if command == "up" else ["--kafka", "127.0.0.1:1"]
    for options, warns in ((["--allow-anonymous"], True), (["--api-key", KEY], False)):
        run = forebay(command, "--host", "0.0.0.0", "--port", free_ports(1), *unusable, *options)
        assert run.returncode == 2
        assert ("WARNING: no API key" in run.stderr) is warns
        assert "loopback" not in run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--api-key", ""), "--api-key or FOREBAY_API_KEY: key 1 is empty"),
        (("--api-key", "a", "--api-key", SECRET), "--api-key or FOREBAY_API_KEY: key 2 is invalid"),
        (("--api-key", "a", "--api-key", ","), "--api-key or FOREBAY_API_KEY: key 2 is empty"),
        (("--api-key", f"a,{'x' * 5_000}"), "--api-key or FOREBAY_API_KEY: key 2 is invalid"),
        (("--api-key-file", "/none"), "cannot read --api-key-file /none: No such file or directory"),
        (("--api-key-file", "/dev/null"), "--api-key-file /dev/null has no key"),
        (("--api-key-file", "/dev/zero"), "--api-key-file /dev/zero is larger than"),
        (("--ssl-keyfile", "x"), "--ssl-keyfile requires --ssl-certfile"),
        (("--ssl-certfile", "/none"), "cannot read /none: No such file or directory"),
        (("--cors-allow-origin", "app.example"), "--cors-allow-origin 'app.example': expected *"),
    ],
)
@pytest.mark.parametrize("command", ["up", "ingress"])
def test_unusable_options_are_rejected_without_printing_a_key(
    command: str, options: tuple[str, ...], message: str
) -> None:
    run = forebay(command, "--port", free_ports(1), *options)
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1)
    assert run.stderr.startswith(f"forebay: {message}")
    assert not any(text in run.stderr for text in (SECRET, "xxxxx"))


@pytest.mark.parametrize("value", [f'{{key = "{KEY}"}}', f'["{KEY}", 1]', f'"{KEY} {KEY}"', f'["{KEY} {KEY}"]'])
def test_a_key_in_a_configuration_file_is_not_printed(value: str, tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text(f"api-key = {value}\n")
    run = forebay("up", "--config", file, "--port", free_ports(1))
    assert (run.returncode, "api-key" in run.stderr, KEY in run.stdout + run.stderr) == (2, True, False)


def test_unusable_keys_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    for content, message in ((b"good\nnot good\n", "line 2 is invalid"), (b"\xff", "not UTF-8 text")):
        file.write_bytes(content)
        run = forebay("up", "--port", free_ports(1), "--api-key-file", file)
        assert (run.returncode, message in run.stderr, "good" in run.stderr) == (2, True, False)
    monkeypatch.setenv("FOREBAY_API_KEY", "good, g\u00f6\u00f6d")
    for command in (["up", "--port", str(free_ports(1))], ["trace", "synthetic:requests=1"]):
        run = forebay(*command)
        assert run.returncode == 2
        assert run.stderr.startswith(
            "forebay: --api-key or FOREBAY_API_KEY: key 2 is invalid; expected 1 to 4096 visible"
        )
        assert "d, " not in run.stderr
