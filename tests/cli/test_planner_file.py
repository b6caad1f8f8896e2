"""Files of `forebay planner run` and `planner supervise`: every mistake ends the command with one line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.common import extras
from forebay.cli.planner.planner_file import read_planner_file
from forebay.cli.planner.services import read_supervise_file
from forebay.engine_model.timing import LinearTiming
from forebay.events.scaling import DecodePoint, PlannerSettings, PoolScaling, PrefillPoint
from forebay.planner.actuators.processes import KILL_AFTER_S, ProcessPool
from forebay.processes.planner import KubernetesSettings, ProcessSettings
from forebay.runtime.errors import install_command
from tests.cli.in_process import error_of, forebay
from tests.harness.stub_servers import KubernetesStub

PREFILL: list[dict[str, float]] = [
    {"isl": 100, "ttft_ms": 20, "tokens_per_s": 5000},
    {"isl": 1000, "ttft_ms": 90.5, "tokens_per_s": 11000},
]
DECODE: list[dict[str, float]] = [{"context": 500, "concurrency": 1, "itl_ms": 8, "tokens_per_s": 125}]
PROFILE = {"prefill": PREFILL, "decode": DECODE}
POOL = """
[[pools]]
group = "llama"
pool = "default"
profile = "profile.json"
"""
ENGINE_POOL = f'{POOL}engine_profile = "engine.toml"\n'
ALL_KEYS: dict[str, Any] = {
    "interval_s": 10.0,
    "method": "both",
    "equations": "corrected",
    "ttft_ms": 300.0,
    "itl_ms": 20.5,
    "gpu_budget": 40,
    "min_gpus": 2,
    "max_change": 4,
    "down_sensitivity": 0.7,
    "min_observations": 3,
    "cooldown_s": 30.0,
    "action_timeout_s": 600.0,
    "predictor": "moving-average",
    "advisory": True,
}
POOL_KEYS: dict[str, Any] = {
    "group": "org/llama",
    "pool": "prefill",
    "role": "prefill",
    "min_size": 2,
    "max_size": 8,
    "gpus_per_worker": 4,
    "startup_s": 40.0,
    "kv_tokens": 100_000,
}
POINTS: dict[str, Any] = {
    "prefill": tuple(PrefillPoint(**point) for point in PREFILL),
    "decode": tuple(DecodePoint(**point) for point in DECODE),
}


def written(folder: Path, text: str, profile: Any = PROFILE) -> Path:
    """Write a file and its profile, and return the path of the file."""
    path = folder / "planner.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    (folder / "profile.json").write_text(profile if isinstance(profile, str) else json.dumps(profile))
    return path


def test_missing_keys_of_a_planner_file_have_defaults(tmp_path: Path) -> None:
    pool = PoolScaling(group="llama", pool="default", **POINTS)
    assert read_planner_file(written(tmp_path, POOL)).settings == PlannerSettings(pools=(pool,))


def test_every_key_of_a_planner_file_is_read(tmp_path: Path) -> None:
    pool = POOL_KEYS | {"profile": "profile.json"}
    whole, first = (
        "".join(f"{name} = {json.dumps(value)}\n" for name, value in keys.items()) for keys in (ALL_KEYS, pool)
    )
    second = 'group = "org/llama"\npool = "decode"\nrole = "decode"'
    found = read_planner_file(written(tmp_path, f"{whole}[[pools]]\n{first}[[pools]]\n{second}")).settings
    decode = PoolScaling(group="org/llama", pool="decode", role="decode")
    assert found == PlannerSettings(pools=(PoolScaling(**POOL_KEYS, **POINTS), decode), **ALL_KEYS)


def test_a_pool_of_method_simulate_has_an_engine(tmp_path: Path) -> None:
    (tmp_path / "engine.toml").write_text('kind = "linear"\nwork_us = 700\n[costs_us]\nstep = 2000\n')
    found = read_planner_file(written(tmp_path, f'method = "simulate"{ENGINE_POOL}kv_tokens = 6400'))
    assert found.settings.pools[0].pool == "default"
    engine = found.engines["llama", "default"]
    assert (engine.workers.count, engine.workers.engine.timing) == (1, LinearTiming(step=2000))
    assert engine.workers.engine.kv_blocks_total == 100
    assert engine.delays.work.fixed_ms == 0.7


def complaint(path: Path) -> str:
    """Run the command, and return the one line of its error."""
    error = error_of("planner", "run", path, "--kafka", "127.0.0.1:1")
    assert error.startswith(f"{path}: ")
    return error.removeprefix(f"{path}: ")


def test_simulated_stages_have_one_block_size(tmp_path: Path) -> None:
    text = 'method = "simulate"'
    for role, size in (("prefill", 16), ("decode", 32)):
        profile = f'kind = "linear"\n[costs_us]\nstep = 2000\n[sizes]\nblock_size = {size}\n'
        (tmp_path / f"{role}.toml").write_text(profile)
        text += POOL.replace("default", role) + f'role = "{role}"\nengine_profile = "{role}.toml"\n'
    assert "pools: the engine profiles of llama have blocks of 16 and 32 tokens" in complaint(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("interval_s", "not TOML"),
        ("", "expected at least one table [[pools]]"),
        ("pools = [1]", "pools[0]: must be a table of fields"),
        (f"interval = 1{POOL}", "unknown key 'interval'; did you mean interval_s?"),
        (f"interval_s = 0{POOL}", "interval_s: must be a number above 0"),
        (f"down_sensitivity = 80{POOL}", "down_sensitivity: must be a number from 0 to 1"),
        (f"max_change = 0{POOL}", "max_change: must be a whole number from 1 to 10000"),
        (f'method = "thruput"{POOL}', "method: must be one of both, load, simulate, throughput"),
        (f'method = "simulate"{POOL}', "pools[0]: engine_profile: method simulate needs an engine profile"),
        (
            f'method = "simulate"{ENGINE_POOL.replace("engine.toml", "mocker")}role = "prefill"',
            "pools: method simulate needs one prefill and one decode pool of llama; got prefill",
        ),
        (f'method = "simulate"{ENGINE_POOL}max_size = 5000', "pools[0]: max_size: must be at most 4096"),
        (ENGINE_POOL, "pools[0]: engine_profile: unknown engine profile"),
        (POOL + 'engine_profile = "profile.json"', "pools[0]: engine_profile: "),
        (f'predictor = "moving"{POOL}', "predictor: unknown predictor 'moving'; did you mean moving-average?"),
        (f"min_gpus = 9{POOL}", "min_gpus: must be at most gpu_budget, which is 8; got 9"),
        (f"{POOL}min_size = 9", "gpu_budget: the smallest sizes of all pools need 9 GPUs, got 8"),
        (f'{POOL}role = "decoder"', "pools[0].role: must be one of aggregated, decode, encode, prefill"),
        (f'{POOL}role = "encode"', "pools[0]: role: no method sizes pools of role encode"),
        (f"{POOL}prefill = [{{isl = 1, ttft_ms = 1, tokens_per_s = 1}}]", "pools[0]: prefill: expected the points in"),
        (POOL + POOL, "pools[1]: llama/default is also pools[0]; use each pool once"),
        (POOL.replace('pool = "default"', ""), "pools[0].pool: missing key"),
        (POOL.replace("default", "a b"), "pools[0]: the pool name 'a b' cannot be used"),
        (POOL.replace("profile.json", "none.json"), "none.json: No such file or directory"),
        (POOL.replace('profile = "profile.json"', ""), "pools[0]: profile: method throughput needs prefill points"),
    ],
)
def test_a_mistake_in_the_file_is_named_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in complaint(written(tmp_path, text))


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("{", "profile.json: Input data was truncated"),
        ([], "profile.json: must be a table of fields"),
        ({"prefil": PREFILL}, "unknown key 'prefil'; did you mean prefill?"),
        ({"prefill": [*PREFILL, {**PREFILL[0], "isl": 0}]}, "prefill[2].isl: must be a number above 0"),
        ({"prefill": [{**PREFILL[0], "x": 1}]}, "prefill[0]: unknown key 'x'"),
        ({"prefill": [{"isl": 1, "ttft_ms": 1}]}, "prefill[0].tokens_per_s: missing key"),
        ({"prefill": [PREFILL[1], *PREFILL]}, "prefill[2]: prefill[0] has the same isl"),
        (PROFILE | {"decode": DECODE * 2}, "decode[1]: decode[0] has the same context and concurrency"),
        ({"decode": DECODE}, "pools[0]: profile: method throughput needs prefill points"),
        (
            {"prefill": [{**PREFILL[0], "isl": at + 0.5} for at in range(30_000)]},
            "profile is larger than 1048576 bytes",
        ),
    ],
)
def test_a_mistake_in_a_profile_is_named_in_one_line(tmp_path: Path, profile: Any, expected: str) -> None:
    found = complaint(written(tmp_path, POOL, profile))
    assert found.startswith("pools[0]: ")
    assert expected in found


def test_profiles_that_do_not_fit_into_a_record_are_rejected(tmp_path: Path) -> None:
    points = [{**PREFILL[0], "isl": at + 0.5} for at in range(15_000)]
    text = POOL + POOL.replace('"default"', '"second"')
    assert "use fewer points" in complaint(written(tmp_path, text, {"prefill": points}))


def test_a_decode_pool_needs_decode_points_for_method_throughput(tmp_path: Path) -> None:
    text = f'{POOL}role = "decode"'
    assert "needs decode points" in complaint(written(tmp_path, text, {"prefill": PREFILL}))
    (pool,) = read_planner_file(written(tmp_path, text, {"decode": DECODE})).settings.pools
    assert (pool.prefill, len(pool.decode)) == ((), 1)


def test_an_invalid_name_and_a_missing_broker_end_the_command(tmp_path: Path) -> None:
    path = written(tmp_path, POOL)
    assert (
        error_of("planner", "run", path, "--id", "a b") == "--id: the planner name 'a b' cannot be used: it has a space"
    )
    assert "Kafka at 127.0.0.1:1 cannot be used" in error_of("planner", "run", path, "--kafka", "127.0.0.1:1")


PYTHON = sys.executable
SUPERVISED = f"""[[pools]]
group = "llama"
pool = "default"
command = ["{PYTHON}", "-m", "forebay.cli", "worker"]
"""
PROCESSES = f'actuator = "processes"\nstate = "state"\n{SUPERVISED}'
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


def supervise_file(folder: Path, text: str) -> Path:
    path = folder / "supervise.toml"
    path.write_text(text)
    return path


def test_a_file_for_processes(tmp_path: Path) -> None:
    more = SUPERVISED.replace('"default"', '"prefill"') + "kill_after_s = 90\n"
    found = read_supervise_file(supervise_file(tmp_path, PROCESSES + more))
    command = (PYTHON, "-m", "forebay.cli", "worker")
    assert found == ProcessSettings(
        tmp_path / "state",
        (ProcessPool("llama", "default", command, KILL_AFTER_S), ProcessPool("llama", "prefill", command, 90.0)),
    )


def test_a_file_for_kubernetes(tmp_path: Path) -> None:
    found = read_supervise_file(supervise_file(tmp_path, KUBERNETES))
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
        ("x = 1", "unknown actuator ''; actuators are: processes, kubernetes"),
        (changed(PROCESSES, "processes", "process"), "unknown actuator 'process'; did you mean processes?"),
        (changed(PROCESSES, 'state = "state"', ""), "state: missing key"),
        (changed(KUBERNETES, "[[pools]]", '[[pools]]\nstate = "x"'), "pools[0]: unknown key 'state'"),
        (f'state = "x"\n{KUBERNETES}', "unknown key 'state'"),
        (changed(PROCESSES, SUPERVISED, ""), "expected at least one table [[pools]]"),
        (changed(PROCESSES, "command", "commands"), "pools[0]: unknown key 'commands'; did you mean command?"),
        (changed(PROCESSES, 'group = "llama"\n', ""), "pools[0].group: missing key"),
        (changed(PROCESSES, "command = [", "# ["), "pools[0].command: missing key"),
        (changed(PROCESSES, '"llama"', '"../x"'), "pools[0]: the model name '../x' cannot be used"),
        (changed(PROCESSES, '"default"', '"a/b"'), "pools[0]: the pool name 'a/b' cannot be used"),
        (
            changed(PROCESSES, f'["{PYTHON}", "-m", "forebay.cli", "worker"]', '"forebay"'),
            "pools[0].command: must be a list",
        ),
        (
            changed(PROCESSES, f'["{PYTHON}", "-m", "forebay.cli", "worker"]', "[]"),
            "llama/default: the command is empty",
        ),
        (changed(PROCESSES, '"worker"', '"\\u0000"'), "an argument of the command contains a NUL character"),
        (changed(PROCESSES, PYTHON, "/nowhere/python"), "the program '/nowhere/python' was not found"),
        (PROCESSES + "kill_after_s = -1", "pools[0].kill_after_s: must be a number from 0 to"),
        (PROCESSES + SUPERVISED, "pools[1]: llama/default is also pools[0]; use each pool once"),
        (changed(KUBERNETES, "serving/prefill", "prefill"), 'expected deployment = "NAMESPACE/NAME", got "prefill"'),
        (
            changed(KUBERNETES, 'deployment = "serving/prefill"', ""),
            "expected one of the keys deployment and statefulset",
        ),
        (f'{KUBERNETES}deployment = "a/b"', "expected one of the keys deployment and statefulset"),
    ],
)
def test_a_mistake_in_a_file_to_supervise_is_named_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "supervise.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    run = forebay("planner", "supervise", path, "--kafka", "127.0.0.1:1")
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"forebay: {path}: ")
    assert expected in line
    assert [one.name for one in tmp_path.iterdir()] == ["supervise.toml"]


def test_a_missing_or_large_file_is_named(tmp_path: Path) -> None:
    assert error_of("planner", "supervise", tmp_path / "none.toml").endswith("/none.toml: No such file or directory")
    path = supervise_file(tmp_path, "#" * (1 << 20) + "\n")
    assert "larger than 1048576 bytes" in forebay("planner", "supervise", path).stderr


def test_kubernetes_requires_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = supervise_file(tmp_path, KUBERNETES)
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    run = forebay("planner", "supervise", path)
    assert run.returncode == 2
    assert run.stderr.endswith(f"install it with: {install_command('kubernetes')}\n")


def test_an_unusable_kubeconfig_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert f"cannot connect to Kubernetes with {tmp_path}/none: " in error_of(
        "planner", "supervise", str(supervise_file(tmp_path, KUBERNETES)), "--kafka", "127.0.0.1:1"
    )


@pytest.mark.parametrize("text", [PROCESSES, KUBERNETES])
def test_a_broker_that_does_not_respond_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    KubernetesStub({}, 1).write_kubeconfig(kubeconfig)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    run = forebay("planner", "supervise", supervise_file(tmp_path, text), "--kafka", "127.0.0.1:1")
    assert (run.returncode, "Kafka at 127.0.0.1:1 cannot be used" in run.stderr) == (2, True)


def test_a_state_directory_that_cannot_be_used_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    assert f"the state directory {tmp_path}/state cannot be written" in error_of(
        "planner", "supervise", str(supervise_file(tmp_path, PROCESSES)), "--kafka", "127.0.0.1:1"
    )
