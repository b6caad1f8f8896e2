"""Determinism check of a user's policy. It runs before the policy makes a decision, because replay repeats decisions.

Theory of operation. Two processes run the policy on the same cases (see `forebay.cli.policies.trial`). The processes
have different values of PYTHONHASHSEED, and the second one runs the cases in reverse order. Both must select the same
candidates. The check is no proof: it often finds state, clocks, randomness and the order of sets, and it cannot find a
file or a math function whose result differs on another machine only.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from forebay.events.names import unknown_name
from forebay.ingress.errors import Unusable

if TYPE_CHECKING:
    from forebay.cli.policies.trial import Trial

HASH_SEEDS = (1, 2)
TRIAL_S = 60.0  # seconds for a trial of 640 decisions, each of which should take microseconds
PATH_CHARS_MAX = 256  # the maximum length of a router mode in an event


def require_policy(mode: str) -> None:
    """Check that a router mode is built in or names a deterministic policy.

    Raises:
        Unusable: The mode is unknown, the class cannot be used, or the check failed.
    """
    from forebay.core.routing.policies import BUILT_IN  # noqa: PLC0415 - --help does not wait for the router

    if mode in BUILT_IN:
        return
    if not all(part.isidentifier() for part in mode.split(".")) or "." not in mode:
        raise Unusable(unknown_name("router mode", mode, (*BUILT_IN, "module.Class")))
    if len(mode) > PATH_CHARS_MAX:
        raise Unusable(f"the path of a policy class has {len(mode)} characters; maximum {PATH_CHARS_MAX}")
    add_current_directory()
    require_deterministic(mode)


def add_current_directory() -> None:
    """Append the current directory to `sys.path`, so that it hides neither installed modules nor PYTHONPATH."""
    current = str(Path.cwd())
    if current not in sys.path and "" not in sys.path:
        sys.path.append(current)


def require_deterministic(path: str) -> None:
    """Check in two processes that a policy is deterministic.

    Args:
        path: Dotted path of the policy class.

    Raises:
        Unusable: The class cannot be used, or is not deterministic.
    """
    from forebay.cli.policies.trial import RULE  # noqa: PLC0415 - --help does not wait for the router

    with ExitStack() as running:
        trials = []
        for seed in HASH_SEEDS:
            trials.append(running.enter_context(_start(path, seed, backwards=seed != HASH_SEEDS[0])))
            running.callback(trials[-1].kill)
        one, other = (_result(path, trial) for trial in trials)
    for number, (first, second) in enumerate(zip(one.chosen, other.chosen, strict=True)):
        if first != second:
            runs = f"case {number} chose {first} with PYTHONHASHSEED={HASH_SEEDS[0]}, {second} with {HASH_SEEDS[1]}"
            raise Unusable(f"{path} is not deterministic: {runs}; {RULE}, nor the order of a set")


def _start(path: str, hash_seed: int, *, backwards: bool) -> "subprocess.Popen[bytes]":
    """Start a process that tests a policy."""
    # -P and PYTHONPATH repeat this process's search path: the current directory must not hide the standard library.
    search_path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    return subprocess.Popen(  # noqa: S603 - this Python, with the policy that the user named
        [sys.executable, "-P", "-m", "forebay.cli.policies.trial", path, *(["backwards"] if backwards else [])],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": search_path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _result(path: str, trial: "subprocess.Popen[bytes]") -> "Trial":
    """Wait for a test process and return its result.

    Raises:
        Unusable: The test failed, took more than TRIAL_S, or ended its process.
    """
    from forebay.cli.policies.trial import Trial  # noqa: PLC0415 - --help does not wait for the router

    try:
        out, err = trial.communicate(timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        text = f"the determinism check of policy {path} did not finish within {TRIAL_S:g} s; make its decide() faster"
        raise Unusable(text) from None
    try:
        result = msgspec.json.decode(out, type=Trial)
    except msgspec.DecodeError:
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        text = f"the determinism check of policy {path} ended with exit code {trial.returncode} {last}".strip()
        raise Unusable(text) from None
    if result.fault:
        raise Unusable(result.fault)
    return result
