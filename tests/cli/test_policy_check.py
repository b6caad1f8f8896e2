"""A user's policy is tried before it decides: what is not deterministic is refused, with the reason."""

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
from forebay.cli.policies.trial import FAULT_CHARS_MAX, Trial
from forebay.ingress.errors import Unusable

FOREBAY = str(Path(sys.executable).with_name("forebay"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, from which policies are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def write(here: Path, body: str, *, top: str = "", name: str = "mine") -> None:
    """A module with a class `Policy`, `decide` having this body and the module beginning with `top`."""
    text = f"{dedent(top)}\n\nclass Policy:\n    count = 0\n\n    def decide(self, world, request):\n"
    (here / f"{name}.py").write_text(text + indent(dedent(body), "        "))


def reason(path: str = "mine.Policy") -> str:
    with pytest.raises(Unusable) as refusal:
        require_policy(path)
    return str(refusal.value)


CHEAPEST = "return min(range(len(world.costs)), key=lambda at: (world.costs[at], at))"

# The module before the class, and the body of `decide`; of those that are refused also what is said.
FINE = [
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
CALLS = [
    ("import time", "return int(time.time()) % 1", "calls time.time() (mine.py:7)"),
    ("from time import monotonic as now", "return int(now()) % 1", "calls time.monotonic() (mine.py:7)"),
    ("import time", "time.sleep(0)\nreturn 0", "calls time.sleep()"),
    ("import random", "return random.randrange(len(world.candidates))", "calls random.randrange()"),
    ("import random", "return int(random.random())", "calls random.random()"),
    ("import random", "return int(random.Random(7).random())", "calls random.Random()"),
    ("from random import choice", "return choice([0])", "calls random.choice()"),
    ("import os", "return os.urandom(1)[0] * 0", "calls os.urandom()"),
    ("import os", "return 0 * len(os.environ['PATH'])", "calls os.environ (mine.py:7)"),
    ("import os", "return 0 * len(os.getenv('PATH'))", "calls os.environ (mine.py:7)"),
    ("import os", "os._exit(3)", "calls os._exit()"),
    ("import secrets", "return secrets.randbelow(1)", "calls secrets.randbelow()"),
    ("import uuid", "return uuid.uuid4().int * 0", "calls uuid.uuid4()"),
    ("from datetime import datetime", "return datetime.now().year * 0", "calls datetime.datetime.now()"),
    ("from datetime import date", "return date.today().year * 0", "calls datetime.date.today()"),
    ("import socket", "socket.socket()\nreturn 0", "calls socket.socket()"),
    ("import threading", "threading.Thread(target=print).start()\nreturn 0", "calls threading.Thread.start()"),
    ("import subprocess", "subprocess.run(['true'])\nreturn 0", "calls subprocess.run()"),
    ("", "open('mine.py')\nreturn 0", "calls open()"),
    ("from pathlib import Path", "Path('mine.py').read_text()\nreturn 0", "calls pathlib.Path.read_text()"),
    ("import math", "return int(math.exp(0)) - 1", "calls math.exp() (mine.py:7), whose last bits differ"),
    ("", "return id(request) % 1", "calls id() (mine.py:7), which differs between processes"),
    ("import time\nSTARTED = time.time()", "return 0", "calls time.time() (mine.py:2)"),
    ("import os\nHOME = os.environ.get('HOME')", "return 0", "calls os.environ (mine.py:2)"),
    ("import clock", "return 0", "calls time.time_ns() (clock.py:2)"),
]
NO_DECISIONS = [
    ("", "return len(world.candidates)", "returned 1 of 1 candidates in case 0: positions are 0 to 0"),
    ("", "return -1", "returned -1 of 1 candidates"),
    ("", "return None", "returned None in case 0: not an int"),
    ("", "return 10**5_000", "returned something of type int of 1 candidates"),
    ("", "return ['long'] * 10_000", "returned ['long', 'long', "),
    ("", "raise ValueError('two\\nlines \\x1b[2J')", "raised ValueError in case 0: two lines  [2J"),
    ("", "return 0.0", "returned 0.0 in case 0: not an int"),
    ("", "return False", "returned False in case 0: not an int"),
    ("", "return len(world.candidates) // (len(world.candidates) - 1)", "raised ZeroDivisionError in case 0"),
    ("", "raise SystemExit(4)", "raised SystemExit in case 0: 4"),
    ("", "world.costs.sort(reverse=True)\nreturn 0", "changes what it was given in case "),
    ("", "self.count += 1\nreturn self.count % len(world.candidates)", "keeps state between decisions: case "),
    ("", "Policy.count += 1\nreturn Policy.count % len(world.candidates)", "keeps state between decisions: case "),
    (
        "SEEN = []",
        "SEEN.append(1)\nreturn len(SEEN) % len(world.candidates)",
        "keeps state between decisions: case ",
    ),
]
TRIED = [*FINE, *(case[:2] for case in (*CALLS, *NO_DECISIONS))]
HOLD_TRIALS = """
import sys, msgspec
from forebay.cli.policies.trial import hold_trial
print(msgspec.json.encode([hold_trial(path, backwards=False) for path in sys.argv[1:]]).decode(), file=sys.__stdout__)
"""


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Trial]:
    """All policies of the tables tried in one process, which is quicker than two for each."""
    here = tmp_path_factory.mktemp("tried")
    (here / "helper.py").write_text("import json\n\ndef first(world):\n    return json.loads('0')\n")
    (here / "clock.py").write_text("import time\nNOW = time.time_ns()\n")
    for number, (top, body) in enumerate(TRIED):
        write(here, body, top=top, name=f"mine{number}")
    paths = [f"mine{number}.Policy" for number in range(len(TRIED))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(here)])}
    command = [sys.executable, "-c", HOLD_TRIALS, *paths]
    run = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    told = msgspec.json.decode(run.stdout.splitlines()[-1], type=list[Trial])
    return dict(zip(TRIED, told, strict=True))


@pytest.mark.parametrize(("top", "body"), FINE)
def test_deterministic_policies_pass(trials: dict[tuple[str, str], Trial], top: str, body: str) -> None:
    assert trials[top, body].fault == ""
    assert len(trials[top, body].chosen) == CASES


@pytest.mark.parametrize(("top", "body", "says"), CALLS)
def test_calls_that_read_the_outside_are_named(
    trials: dict[tuple[str, str], Trial], top: str, body: str, says: str
) -> None:
    module = f"mine{TRIED.index((top, body))}"
    assert trials[top, body].fault.startswith(f"{module}.Policy {says.replace('mine.py', module + '.py')}")


@pytest.mark.parametrize(("top", "body", "says"), NO_DECISIONS)
def test_what_is_no_decision_is_refused(trials: dict[tuple[str, str], Trial], top: str, body: str, says: str) -> None:
    fault = trials[top, body].fault
    assert fault.startswith(f"mine{TRIED.index((top, body))}.Policy {says}")
    assert len(fault) <= FAULT_CHARS_MAX + 1


def test_a_deterministic_policy_is_taken(here: Path) -> None:
    write(here, CHEAPEST)
    require_policy("mine.Policy")


def test_built_in_modes_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    require_policy("kv")
    require_policy("power-of-two")


def test_a_call_that_the_policy_catches_is_found_all_the_same(here: Path) -> None:
    write(here, "try:\n    return int(time.time()) % 2\nexcept Exception:\n    return 0", top="import time")
    assert reason().startswith("mine.Policy calls time.time() (mine.py:8)")


def test_the_order_of_a_set_of_strings_is_found_by_another_hash_seed(here: Path) -> None:
    write(here, "return [c.worker_id for c in world.candidates].index({c.worker_id for c in world.candidates}.pop())")
    said = reason()
    assert said.startswith("mine.Policy is not deterministic: case ")
    assert "with hash seed 1 and " in said


def test_a_policy_that_does_not_end_is_stopped(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_check, "TRIAL_S", 0.5)
    write(here, "while True:\n    pass")
    assert reason() == "mine.Policy was not done with its trial after 0.5 s"


def test_a_policy_that_takes_its_process_down(here: Path) -> None:
    write(here, "faulthandler._sigsegv()", top="import faulthandler")
    assert reason().startswith("mine.Policy ended its trial's process with exit code -")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere.Policy", "cannot be imported: ModuleNotFoundError"),
        ("mine.Other", "mine.Other is no class with a method `decide(world, request)`"),
        ("mine.decide", "mine.decide is no class"),
        ("broken.Policy", "cannot be imported: SyntaxError"),
        ("needy.Policy", "needy.Policy raised TypeError in case 0"),
        (f"mine.{'P' * 300}", "at most 256 characters, not 305"),
    ],
)
def test_what_is_no_policy_is_refused(here: Path, path: str, says: str) -> None:
    write(here, "return 0", top="def decide(world, request):\n    return 0")
    (here / "broken.py").write_text("class Policy")
    (here / "needy.py").write_text("class Policy:\n    def __init__(self, x): ...\n    def decide(self, w, r): ...")
    assert says in reason(path)


def test_the_current_directory_hides_nothing_that_is_installed(here: Path) -> None:
    (here / "queue.py").write_text("raise RuntimeError('the wrong one')")
    write(here, CHEAPEST, top="import queue\nqueue.Queue")
    require_policy("mine.Policy")


def test_the_path_is_that_of_this_process(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_command_does_not_start_with_a_policy_that_is_refused(here: Path, command: list[str], named: str) -> None:
    write(here, "return int(time.time()) % 1", top="import time")
    run = subprocess.run([FOREBAY, *command, "mine.Policy"], capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"forebay: {named}mine.Policy calls time.time() (mine.py:7), ")
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("mode", "code", "says"),
    [("mine.Policy", 0, "mine.Policy"), ("mine.Other", 1, "FOREBAY_ROUTER_MODE: mine.Other is no class")],
)
def test_the_router_under_fausts_own_command_line_takes_variables(here: Path, mode: str, code: int, says: str) -> None:
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
    assert says in run.stdout + run.stderr
