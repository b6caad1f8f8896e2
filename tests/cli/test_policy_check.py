"""Determinism check of user policies: nondeterministic and invalid policies are rejected with the reason."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

import msgspec
import pytest

from forebay.cli.policies import check as policy_check
from forebay.cli.policies.cases import CASES
from forebay.cli.policies.check import require_policy
from forebay.cli.policies.trial import FAULT_CHARS_MAX, Trial, run_trial
from forebay.ingress.errors import Unusable
from tests.harness import fork_server


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty directory, from which policies are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def write(here: Path, body: str, *, top: str = "", name: str = "mine") -> None:
    """Write a module that begins with `top` and has a class `Policy` whose method `decide` has this body."""
    text = f"{dedent(top)}\n\nclass Policy:\n    count = 0\n\n    def decide(self, world, request):\n"
    (here / f"{name}.py").write_text(text + indent(dedent(body), "        "))


def reason(path: str = "mine.Policy") -> str:
    with pytest.raises(Unusable) as refusal:
        require_policy(path)
    return str(refusal.value)


CHEAPEST = "return min(range(len(world.costs)), key=lambda at: (world.costs[at], at))"

# Text of the module before the class, and body of `decide`. INVALID has the beginning of the message, too.
DETERMINISTIC = [
    ("", CHEAPEST),
    ("", "return request.tie_seed % len(world.candidates)"),
    ("", "return world.turn % len(world.candidates)"),
    ("", "return sorted({c.worker_id for c in world.candidates}).index(world.candidates[0].worker_id)"),
    ("from decimal import Decimal", "return int(Decimal(request.prompt_tokens).ln() * 0)"),
    ("import math", "return math.floor(math.sqrt(len(world.candidates)) / 2)"),
    (
        "",
        "import heapq\nreturn heapq.nsmallest(1, range(len(world.costs)), world.costs.__getitem__)[0]",
    ),
    ("import time\nimport random\nimport socket\nimport asyncio\nfrom datetime import datetime", CHEAPEST),
    (
        "from forebay.core.routing.selection import lowest",
        "print('hello')\nreturn 0 * len(str(lowest(world.costs, 1)))",
    ),
    ("import helper", "return helper.first(world)"),
]
NONDETERMINISTIC = [
    ("import time", "return time.time_ns() % len(world.candidates)"),
    ("import time", "try:\n    return time.time_ns() % len(world.candidates)\nexcept Exception:\n    return 0"),
    ("import random", "return random.randrange(len(world.candidates))"),
    ("import os", "return os.urandom(1)[0] % len(world.candidates)"),
    ("import uuid", "return uuid.uuid4().int % len(world.candidates)"),
    ("", "self.count += 1\nreturn self.count % len(world.candidates)"),
    ("", "Policy.count += 1\nreturn Policy.count % len(world.candidates)"),
    ("SEEN = []", "SEEN.append(1)\nreturn len(SEEN) % len(world.candidates)"),
]
INVALID = [
    ("", "return len(world.candidates)", "returned 1 in case 0; expected a position from 0 to 0"),
    ("", "return -1", "returned -1 in case 0; "),
    ("", "return None", "returned None in case 0; expected an int"),
    ("", "return 10**5_000", "returned a value of type int in case 0"),
    ("", "return ['long'] * 10_000", "returned ['long', 'long', "),
    ("", "raise ValueError('two\\nlines \\x1b[2J')", "raised ValueError in case 0: two lines  [2J"),
    ("", "return 0.0", "returned 0.0 in case 0; expected an int"),
    ("", "return False", "returned False in case 0; expected an int"),
    ("", "return len(world.candidates) // (len(world.candidates) - 1)", "raised ZeroDivisionError in case 0"),
    ("", "raise SystemExit(4)", "raised SystemExit in case 0: 4"),
    ("", "world.costs.sort(reverse=True)\nreturn 0", "changed its world or its request in case "),
]
POLICIES = [*DETERMINISTIC, *NONDETERMINISTIC, *(case[:2] for case in INVALID)]
RUN_TRIALS = """
import sys, msgspec
from forebay.cli.policies.trial import run_trial
print(msgspec.json.encode([run_trial(path, backwards=False) for path in sys.argv[1:]]).decode(), file=sys.__stdout__)
"""


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Trial]:
    """Run all policies of the tables in one process, which is faster than two processes per policy."""
    here = tmp_path_factory.mktemp("policies")
    (here / "helper.py").write_text("import json\n\ndef first(world):\n    return json.loads('0')\n")
    for number, (top, body) in enumerate(POLICIES):
        write(here, body, top=top, name=f"mine{number}")
    paths = [f"mine{number}.Policy" for number in range(len(POLICIES))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(here)])}
    command = [sys.executable, "-c", RUN_TRIALS, *paths]
    run = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    results = msgspec.json.decode(run.stdout.splitlines()[-1], type=list[Trial])
    return dict(zip(POLICIES, results, strict=True))


@pytest.mark.parametrize(("top", "body"), DETERMINISTIC)
def test_deterministic_policies_pass(trials: dict[tuple[str, str], Trial], top: str, body: str) -> None:
    assert trials[top, body].fault == ""
    assert len(trials[top, body].chosen) == CASES


@pytest.mark.parametrize(("top", "body"), NONDETERMINISTIC)
def test_nondeterministic_policies_fail(trials: dict[tuple[str, str], Trial], top: str, body: str) -> None:
    module = f"mine{POLICIES.index((top, body))}"
    assert trials[top, body].fault.startswith(f"{module}.Policy is not deterministic: case ")


@pytest.mark.parametrize(("top", "body", "message"), INVALID)
def test_invalid_decisions_fail(trials: dict[tuple[str, str], Trial], top: str, body: str, message: str) -> None:
    fault = trials[top, body].fault
    assert fault.startswith(f"mine{POLICIES.index((top, body))}.Policy {message}")
    assert len(fault) <= FAULT_CHARS_MAX + 1


def test_deterministic_policy_is_accepted(here: Path) -> None:
    write(here, CHEAPEST)
    require_policy("mine.Policy")


def test_built_in_modes_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    require_policy("kv")
    require_policy("power-of-two")


def test_policy_that_uses_the_order_of_a_set_fails(here: Path) -> None:
    write(here, "return [c.worker_id for c in world.candidates].index({c.worker_id for c in world.candidates}.pop())")
    message = reason()
    assert message.startswith("mine.Policy is not deterministic: case ")
    assert "with PYTHONHASHSEED=1, " in message


def test_policy_that_does_not_return_times_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_check, "TRIAL_S", 0.5)
    write(here, "while True:\n    pass")
    assert reason() == (
        "the determinism check of policy mine.Policy did not finish within 0.5 s; make its decide() faster"
    )


def test_policy_that_ends_its_process_fails(here: Path) -> None:
    write(here, "faulthandler._sigsegv()", top="import faulthandler")
    assert reason().startswith("the determinism check of policy mine.Policy ended with exit code -")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.Policy", "cannot be imported: ModuleNotFoundError"),
        ("mine.Other", "mine.Other is not a class with a method `decide(world, request)`"),
        ("mine.decide", "mine.decide is not a class"),
        ("broken.Policy", "cannot be imported: SyntaxError"),
        ("needy.Policy", "needy.Policy raised TypeError in case 0"),
    ],
)
def test_unusable_classes_fail(here: Path, path: str, message: str) -> None:
    write(here, "return 0", top="def decide(world, request):\n    return 0")
    (here / "broken.py").write_text("class Policy")
    (here / "needy.py").write_text("class Policy:\n    def __init__(self, x): ...\n    def decide(self, w, r): ...")
    sys.path.append(str(here))
    assert message in run_trial(path, backwards=False).fault


def test_unusable_class_is_rejected(here: Path) -> None:
    write(here, "return 0")
    assert reason("mine.Other") == "mine.Other is not a class with a method `decide(world, request)`"


def test_long_path_of_a_class_is_rejected() -> None:
    assert "has 305 characters; maximum 256" in reason(f"mine.{'P' * 300}")


def test_current_directory_does_not_hide_installed_modules(here: Path) -> None:
    (here / "queue.py").write_text("raise RuntimeError('the wrong one')")
    write(here, CHEAPEST, top="import queue\nqueue.Queue")
    require_policy("mine.Policy")


def test_check_uses_the_search_path_of_its_caller(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "pack").mkdir()
    (here / "elsewhere").mkdir()
    write(here / "pack", CHEAPEST)
    monkeypatch.chdir(here / "elsewhere")
    monkeypatch.syspath_prepend(here / "pack")
    require_policy("mine.Policy")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["up", "--port", "18199", "--router-mode"], "--router-mode: "),
        (["router", "--kafka", "127.0.0.1:1", "--router-mode"], "--router-mode: "),
        (["simulate", "none.jsonl", "--policy"], ""),
    ],
)
def test_commands_reject_a_nondeterministic_policy(here: Path, command: list[str], named: str) -> None:
    write(here, "self.count += 1\nreturn self.count % len(world.candidates)")
    run = fork_server.run(*command, "mine.Policy", timeout_s=60)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"forebay: {named}mine.Policy is not deterministic: ")
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("mode", "code", "message"),
    [
        # The other case reads the same variable, and tests above accept this policy.
        pytest.param("mine.Policy", 0, "mine.Policy", marks=pytest.mark.slow),
        ("mine.Other", 1, "FOREBAY_ROUTER_MODE: mine.Other is not a class"),
    ],
)
def test_faust_router_reads_environment_variables(here: Path, mode: str, code: int, message: str) -> None:
    write(here, CHEAPEST)
    run = subprocess.run(
        [sys.executable, "-P", "-c", "from forebay.cli.processes.faust_router import config; print(config.mode)"],
        env={**os.environ, "FOREBAY_ROUTER_MODE": mode},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == code
    assert message in run.stdout + run.stderr
