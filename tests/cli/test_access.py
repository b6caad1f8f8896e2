"""Options of `forebay up` and `forebay ingress` that decide who may send requests: API keys, TLS and the address."""

import json
import signal
from pathlib import Path

import httpx
import openai
import pytest
import trustme

from tests.cli.in_process import forebay
from tests.cli.up import PATIENCE_S, Up
from tests.harness.local import free_ports

KEY = "a-key-of-this-test"
SECRET = "not=a+secret of anybody"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the options that serve HTTPS; clients of this process trust the certificate."""
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    issued = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
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
        assert explained.json()["request_id"] == answer.id
        trace = ["trace", "synthetic:requests=3,rate=50,prompt=100,output=3", "--url", up.url, "--json"]
        refused = forebay(*trace)
        assert refused.returncode == 2
        assert "the API key is missing or wrong; set FOREBAY_API_KEY or --api-key" in refused.stderr
        plain = up.url.replace("https:", "http:")
        wrong = forebay("trace", "synthetic:requests=1", "--url", plain)
        assert (wrong.returncode, "a system with a certificate serves only https" in wrong.stderr) == (2, True)
        with monkeypatch.context() as untrusted:
            untrusted.delenv("SSL_CERT_FILE")
            for command in (trace, ["control", "adapters", "--url", up.url]):
                run = forebay(*command)
                assert (run.returncode, "set SSL_CERT_FILE" in run.stderr) == (2, True)
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


@pytest.mark.parametrize("command", ["up", "ingress"])
def test_other_machines_are_served_with_a_key_or_permission_only(command: str, tmp_path: Path) -> None:
    run = forebay(command, "--host", "0.0.0.0", "--port", str(free_ports(1)))
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1)
    assert run.stderr.startswith("forebay: --host 0.0.0.0 is not a loopback address")
    assert "--api-key" in run.stderr
    assert "--allow-anonymous" in run.stderr
    unusable = ["--log", str(tmp_path)] if command == "up" else ["--kafka", "127.0.0.1:1"]
    for options, warns in ((["--allow-anonymous"], True), (["--api-key", KEY], False)):
        run = forebay(command, "--host", "0.0.0.0", "--port", str(free_ports(1)), *unusable, *options)
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
    run = forebay(command, "--port", str(free_ports(1)), *options)
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1)
    assert run.stderr.startswith(f"forebay: {message}")
    assert not any(text in run.stderr for text in (SECRET, "xxxxx"))


@pytest.mark.parametrize("value", [f'{{key = "{KEY}"}}', f'["{KEY}", 1]', f'"{KEY} {KEY}"', f'["{KEY} {KEY}"]'])
def test_a_key_in_a_configuration_file_is_not_printed(value: str, tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text(f"api-key = {value}\n")
    run = forebay("up", "--config", str(file), "--port", str(free_ports(1)))
    assert (run.returncode, "api-key" in run.stderr, KEY in run.stdout + run.stderr) == (2, True, False)


def test_unusable_keys_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    for content, message in ((b"good\nnot good\n", "key 2 is invalid"), (b"\xff", "not UTF-8 text")):
        file.write_bytes(content)
        run = forebay("up", "--port", str(free_ports(1)), "--api-key-file", str(file))
        assert (run.returncode, message in run.stderr, "good" in run.stderr) == (2, True, False)
    monkeypatch.setenv("FOREBAY_API_KEY", "good, g\u00f6\u00f6d")
    for command in (["up", "--port", str(free_ports(1))], ["trace", "synthetic:requests=1"]):
        run = forebay(*command)
        assert run.returncode == 2
        assert run.stderr.startswith(
            "forebay: --api-key or FOREBAY_API_KEY: key 2 is invalid; expected 1 to 4096 visible"
        )
        assert "d, " not in run.stderr
