"""A user's policy must be deterministic before anything is decided with it: replay derives its decisions again.

Theory of operation. Two processes with different hash seeds try it on the same cases in opposite orders (see
`forebay.cli.policies.trial`); what they choose must be equal. That is no proof, but it finds what policies do by
accident: clocks, chance, the outside, kept state, the order of sets, object ids.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec

from forebay.cli.policies.trial import Trial
from forebay.core.routing.policies import BUILT_IN
from forebay.ingress.errors import Unusable

HASH_SEEDS = (1, 2)
TRIAL_S = 60.0  # a trial is 640 decisions, each of which should take microseconds
PATH_CHARS_MAX = 256  # of a mode on the wire


def require_policy(mode: str) -> None:
    """Refuse what is neither a built-in mode nor a deterministic policy (Unusable, with the reason)."""
    if mode in BUILT_IN:
        return
    if not all(part.isidentifier() for part in mode.split(".")) or "." not in mode:
        raise Unusable(f"{mode} is no router mode ({', '.join(BUILT_IN)}) and no class as module.Class")
    if len(mode) > PATH_CHARS_MAX:
        raise Unusable(f"the path of a policy has at most {PATH_CHARS_MAX} characters, not {len(mode)}")
    look_in_current_directory()
    require_deterministic(mode)


def look_in_current_directory() -> None:
    """Let policies be imported from where the user stands; what is installed, or on PYTHONPATH, comes first."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def require_deterministic(path: str) -> None:
    """Refuse a policy, by its dotted path, that cannot be used or is not deterministic (Unusable, with the reason)."""
    with ExitStack() as running:
        trials = []
        for seed in HASH_SEEDS:
            trials.append(running.enter_context(_started(path, seed, backwards=seed != HASH_SEEDS[0])))
            running.callback(trials[-1].kill)
        one, other = (_result(path, trial) for trial in trials)
    for number, (first, second) in enumerate(zip(one.chosen, other.chosen, strict=True)):
        if first != second:
            where = f"case {number} chose {first} with hash seed {HASH_SEEDS[0]} and {second} with {HASH_SEEDS[1]}"
            hint = "does it go by the order of a set, or by object ids?"
            raise Unusable(f"{path} is not deterministic: {where}; {hint}")


def _started(path: str, hash_seed: int, *, backwards: bool) -> "subprocess.Popen[bytes]":
    # The same modules in the same order as here; without -P the current directory would hide the standard library.
    found_in = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    return subprocess.Popen(  # noqa: S603 - this Python, with the policy that it is to run
        [sys.executable, "-P", "-m", "forebay.cli.policies.trial", path, *(["backwards"] if backwards else [])],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": found_in},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _result(path: str, trial: "subprocess.Popen[bytes]") -> Trial:
    try:
        out, err = trial.communicate(timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        raise Unusable(f"{path} was not done with its trial after {TRIAL_S:g} s") from None
    try:
        result = msgspec.json.decode(out, type=Trial)
    except msgspec.DecodeError:
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        raise Unusable(f"{path} ended its trial's process with exit code {trial.returncode} {last}".strip()) from None
    if result.fault:
        raise Unusable(result.fault)
    return result
