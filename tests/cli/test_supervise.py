"""The file of `forebay planner supervise`: every mistake ends the command with exit code 2 and one line."""

import sys
from pathlib import Path

import pytest

from forebay.cli.common import extras
from forebay.cli.planner.supervise import KubernetesSettings, ProcessSettings, read_supervise_file
from forebay.planner.actuators.processes import KILL_AFTER_S, ProcessPool
from tests.cli.in_process import forebay
from tests.harness.kubernetes_stub import KubernetesStub

PYTHON = sys.executable
POOL = f"""[[pools]]
group = "llama"
pool = "default"
command = ["{PYTHON}", "-m", "forebay.cli", "worker"]
"""
PROCESSES = f'actuator = "processes"\nstate = "state"\n{POOL}'
KUBERNETES = """actuator = "kubernetes"
[[pools]]
group = "llama"
pool = "prefill"
deployment = "serving/prefill"
[[pools]]
group = "llama"
pool = "decode"
statefulset = "serving/decode"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "supervise.toml"
    path.write_text(text)
    return path


def test_a_file_for_processes(tmp_path: Path) -> None:
    more = POOL.replace('"default"', '"prefill"') + "kill_after_s = 90\n"
    found = read_supervise_file(written(tmp_path, PROCESSES + more))
    command = (PYTHON, "-m", "forebay.cli", "worker")
    assert found == ProcessSettings(
        tmp_path / "state",
        (ProcessPool("llama", "default", command, KILL_AFTER_S), ProcessPool("llama", "prefill", command, 90.0)),
    )


def test_a_file_for_kubernetes(tmp_path: Path) -> None:
    found = read_supervise_file(written(tmp_path, KUBERNETES))
    assert found == KubernetesSettings(
        {
            ("llama", "prefill"): ("deployment", "serving", "prefill"),
            ("llama", "decode"): ("statefulset", "serving", "decode"),
        }
    )


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("actuator", "not TOML"),
        ("\udcff", "not TOML"),
        ("x = 1", "the key actuator is missing; expected one of processes, kubernetes"),
        (changed(PROCESSES, "processes", "process"), "unknown actuator 'process'; did you mean processes?"),
        (changed(PROCESSES, '"processes"', "1"), "unknown actuator '1'"),
        (changed(PROCESSES, "state", "stat"), "unknown key 'stat'; did you mean state?"),
        (changed(PROCESSES, 'state = "state"', ""), "the key state is missing"),
        (changed(PROCESSES, '"state"', "7"), "the key state is missing or not a path"),
        (changed(KUBERNETES, "[[pools]]", '[[pools]]\nstate = "x"'), "pools[0]: unknown key 'state'"),
        (f'state = "x"\n{KUBERNETES}', "unknown key 'state'"),
        (changed(PROCESSES, POOL, ""), "expected at least one table [[pools]]"),
        (changed(PROCESSES, POOL, "pools = []"), "expected at least one table [[pools]]"),
        (changed(PROCESSES, POOL, 'pools = ["a"]'), "pools[0]: expected a table"),
        (changed(PROCESSES, "command", "commands"), "pools[0]: unknown key 'commands'; did you mean command?"),
        (changed(PROCESSES, 'group = "llama"\n', ""), "pools[0]: group: missing key"),
        (changed(PROCESSES, "command = [", "# ["), "pools[0]: command: missing key"),
        (changed(PROCESSES, '"llama"', "7"), "pools[0]: group: must be a name"),
        (changed(PROCESSES, '"llama"', '"../x"'), "pools[0]: the model name '../x' cannot be used"),
        (changed(PROCESSES, '"default"', '"a/b"'), "pools[0]: the pool name 'a/b' cannot be used"),
        (changed(PROCESSES, '["', '"'), "not TOML"),
        (changed(PROCESSES, f'["{PYTHON}", "-m", "forebay.cli", "worker"]', '"forebay"'), "pools[0]: command: must be"),
        (
            changed(PROCESSES, f'["{PYTHON}", "-m", "forebay.cli", "worker"]', "[]"),
            "llama/default: the command is empty",
        ),
        (changed(PROCESSES, '"worker"', '"\\u0000"'), "an argument of the command contains a NUL character"),
        (changed(PROCESSES, PYTHON, "/nowhere/python"), "the program '/nowhere/python' was not found"),
        (PROCESSES + "kill_after_s = -1", "pools[0]: kill_after_s: must be a number from 0 to"),
        (PROCESSES + 'kill_after_s = "1"', "pools[0]: kill_after_s: must be a number"),
        (PROCESSES + "kill_after_s = nan", "pools[0]: kill_after_s: must be a number"),
        (PROCESSES + POOL, "pools[1]: llama/default is also pools[0]; use each pool once"),
        (changed(KUBERNETES, "serving/prefill", "prefill"), 'expected deployment = "NAMESPACE/NAME", got "prefill"'),
        (changed(KUBERNETES, "serving/prefill", "a/b/c"), 'expected deployment = "NAMESPACE/NAME", got "a/b/c"'),
        (
            changed(KUBERNETES, 'deployment = "serving/prefill"', ""),
            "expected one of the keys deployment and statefulset",
        ),
        (f'{KUBERNETES}deployment = "a/b"', "expected one of the keys deployment and statefulset"),
        (changed(KUBERNETES, "deployment", "deploymnt"), "unknown key 'deploymnt'; did you mean deployment?"),
    ],
)
def test_a_mistake_in_the_file_is_named_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "supervise.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    run = forebay("planner", "supervise", str(path), "--kafka", "127.0.0.1:1")
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"forebay: {path}: ")
    assert expected in line
    assert [one.name for one in tmp_path.iterdir()] == ["supervise.toml"]


def test_a_missing_or_large_file_is_named(tmp_path: Path) -> None:
    run = forebay("planner", "supervise", str(tmp_path / "none.toml"))
    assert (run.returncode, run.stderr) == (
        2,
        f"forebay: {tmp_path}/none.toml: cannot be read: No such file or directory\n",
    )
    path = written(tmp_path, "#" * (1 << 20) + "\n")
    assert "larger than 1 MiB" in forebay("planner", "supervise", str(path)).stderr


def test_kubernetes_requires_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, KUBERNETES)
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    run = forebay("planner", "supervise", str(path))
    assert run.returncode == 2
    assert run.stderr.endswith("install it with: pip install 'forebay[kubernetes]'\n")


def test_an_unusable_kubeconfig_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    run = forebay("planner", "supervise", str(written(tmp_path, KUBERNETES)), "--kafka", "127.0.0.1:1")
    assert run.returncode == 2
    assert f"cannot connect to Kubernetes with {tmp_path}/none: " in run.stderr


@pytest.mark.parametrize("text", [PROCESSES, KUBERNETES])
def test_a_broker_that_does_not_respond_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    KubernetesStub({}, 1).write_kubeconfig(kubeconfig)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    run = forebay("planner", "supervise", str(written(tmp_path, text)), "--kafka", "127.0.0.1:1")
    assert run.returncode == 2
    assert "Kafka at 127.0.0.1:1 cannot be used" in run.stderr


def test_a_state_directory_that_cannot_be_used_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    run = forebay("planner", "supervise", str(written(tmp_path, PROCESSES)), "--kafka", "127.0.0.1:1")
    assert run.returncode == 2
    assert f"the state directory {tmp_path}/state cannot be written" in run.stderr
