"""Router flags, variables and policy files give a `RouterConfig` or a one-line error, and have documentation."""

import io
import json
import re
import sys
from contextlib import redirect_stderr
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import yaml

from forebay.cli.common.command_class import CliCommand
from forebay.cli.common.errors import explained
from forebay.cli.common.options import Number, built, parameters_of
from forebay.cli.policies.allowed import require_policy
from forebay.cli.policies.file import read_policy_file
from forebay.cli.policies.router_options import ROUTER_OPTIONS, RouterOptions
from forebay.events.control import BusyThresholds, DisaggConfig, QueueClass, QueueConfig, RouterConfig

USAGE = 2
SERVING = RouterConfig(queue=QueueConfig(run_ahead=0.25, depth=4.0, timeout_s=10.0))
WEIGHTS = [
    one.opts[0] for one in parameters_of(RouterOptions) if isinstance(one.type, Number) and one.type.kind is float
]


def run_probe(*arguments: str) -> tuple[int, RouterConfig | None, str]:
    """Parse the router options. Return the exit code, the configuration and stderr."""
    with redirect_stderr(io.StringIO()) as stderr:
        try:
            context = CliCommand("probe", RouterOptions, "up").make_context("probe", list(arguments))
            with explained():
                return 0, built(RouterOptions, context.params).config(), stderr.getvalue()
        except click.exceptions.Exit as ended:
            return ended.exit_code, None, stderr.getvalue()


def config(*arguments: str) -> RouterConfig:
    code, got, err = run_probe(*arguments)
    assert code == 0, err
    assert got is not None
    return got


def error_line(*arguments: str) -> str:
    code, got, err = run_probe(*arguments)
    assert (code, got) == (USAGE, None)
    assert len(err.splitlines()) == 1, err
    return err


def test_defaults_apply_without_flags() -> None:
    assert config() == SERVING


def test_every_flag_sets_its_field() -> None:
    for one in parameters_of(RouterOptions):
        if path := ROUTER_OPTIONS[one.name or ""].path:
            before: Any = attrgetter(path)(SERVING)
            expected: Any = 0.5 if before == 1 else 1
            if isinstance(one.type, click.Choice):
                expected = next(choice for choice in one.type.choices if choice != before)
            elif path == "mode":
                expected = "random"
            arguments = [one.opts[0], str(expected)]
            if isinstance(one, click.Option) and one.is_bool_flag:
                arguments, expected = [(one.secondary_opts if before else one.opts)[0]], not before
            group, _, name = path.rpartition(".")
            part = msgspec.structs.replace(getattr(SERVING, group) if group else SERVING, **{name: expected})
            changed = msgspec.structs.replace(SERVING, **{group: part}) if group else part
            assert config(*arguments) == changed != SERVING, path


@pytest.mark.parametrize("flag", WEIGHTS)
@pytest.mark.parametrize("value", ["nan", "-1", "inf"])
def test_negative_and_non_numeric_weights_are_rejected(flag: str, value: str) -> None:
    error = error_line(f"{flag}={value}")
    assert error.startswith(f"forebay: {flag} must be a number from 0 to ")
    assert float(error.split()[-1]) == float(value) or value == "nan"


@pytest.mark.parametrize("value", ["-1", "9" * 400])
def test_a_count_has_bounds(value: str) -> None:
    assert "--active-prefill-tokens-threshold " in error_line(f"--active-prefill-tokens-threshold={value}")


@pytest.mark.parametrize("mode", ["fastest", "", "Mine", "a..B", "a-b.C"])
def test_error_for_an_unknown_mode_lists_the_modes(mode: str) -> None:
    error = error_line("--router-mode", mode)
    assert "--router-mode: " in error
    assert "kv, round-robin, random, power-of-two, least-loaded, direct" in error


def test_load_aware_mode_ignores_the_cache() -> None:
    alone = msgspec.structs.replace(SERVING, overlap_score_credit=0.0, use_kv_events=False)
    assert config("--load-aware") == config("--load-aware", "--router-mode", "kv") == alone
    weighted = config("--load-aware", "--router-decode-active-request-weight", "2")
    assert weighted == msgspec.structs.replace(alone, decode_active_request_weight=2.0)
    error = error_line("--load-aware", "--router-mode", "random")
    assert "--load-aware implies router mode kv and cannot be combined with random" in error


CONDITIONAL = "--router-conditional-disagg"


def test_disagg_conditions_use_the_flags_of_dynamo(tmp_path: Path) -> None:
    assert config(CONDITIONAL).disagg == DisaggConfig(policy="isl_bounding")
    limits = '{"policy": "isl_or_load", "eff_isl_threshold": 512, "decode_busy_threshold": 0.8}'
    meant = DisaggConfig(policy="isl_or_load", eff_isl_threshold=512, decode_busy_threshold=0.8)
    assert config(CONDITIONAL, f"{CONDITIONAL}-config", limits).disagg == meant
    enforced = config(CONDITIONAL, f"{CONDITIONAL}-config", limits, "--enforce-disagg").disagg
    assert enforced == msgspec.structs.replace(meant, enforce=True)
    path = tmp_path / "policy.yaml"
    path.write_text("disagg: {policy: classic, max_local_prefill_length: 10, eff_isl_threshold: 7}")
    kept = DisaggConfig(policy="classic", max_local_prefill_length=10, eff_isl_threshold=7)
    assert config("--router-policy-config", str(path)).disagg == kept
    both = config("--router-policy-config", str(path), CONDITIONAL, f"{CONDITIONAL}-config", '{"eff_isl_threshold": 9}')
    assert both.disagg == msgspec.structs.replace(kept, policy="isl_bounding", eff_isl_threshold=9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", '--router-conditional-disagg-config: { is not JSON; expected an object such as {"policy": "classic"}'),
        ("[]", "--router-conditional-disagg-config: expected an object such as"),
        ('{"limit": 1}', "unknown field 'limit'; fields are: policy, max_local_prefill_length"),
        ('{"policy": "often"}', "-config: policy: must be one of always, classic, isl_bounding, isl_or_load"),
        ('{"max_local_prefill_length": -1}', "-config: max_local_prefill_length: must be a whole number of at least 0"),
        ('{"enforce": "yes"}', "-config: enforce: must be true or false"),
        ('{"eff_isl_ratio_threshold": 2}', "eff_isl_ratio_threshold"),
    ],
)
def test_disagg_invalid_conditions_are_rejected(text: str, message: str) -> None:
    assert message in error_line(CONDITIONAL, f"{CONDITIONAL}-config", text)


def test_disagg_conditions_need_their_flag() -> None:
    assert f"{CONDITIONAL}-config requires {CONDITIONAL}" in error_line(f"{CONDITIONAL}-config", "{}")


def test_flags_override_the_policy_file(tmp_path: Path) -> None:
    settings = {
        "mode": "kv",
        "temperature": 0.3,
        "busy": {"active_decode_blocks_threshold": 0.8},
        "queue": {
            "threshold": 2,
            "timeout_s": 0,
            "run_ahead": None,
            "classes": [{"name": "default"}, {"name": "batch", "quantum": 1024, "policy": "lcfs"}],
        },
    }
    meant = RouterConfig(
        temperature=0.3,
        busy=BusyThresholds(active_decode_blocks_threshold=0.8),
        queue=QueueConfig(
            threshold=2.0, depth=4.0, classes=(QueueClass(), QueueClass(name="batch", quantum=1024, policy="lcfs"))
        ),
    )
    as_json, as_yaml = tmp_path / "policy.json", tmp_path / "policy.yaml"
    as_json.write_text(json.dumps(settings))
    as_yaml.write_text(yaml.safe_dump(settings))
    assert config("--router-policy-config", str(as_json)) == meant
    assert config("--router-policy-config", str(as_yaml)) == meant
    flags = ("--router-temperature", "0", "--router-queue-policy", "wspt", "--active-prefill-tokens-threshold", "7")
    assert config("--router-policy-config", str(as_yaml), *flags) == msgspec.structs.replace(
        meant,
        temperature=0.0,
        busy=msgspec.structs.replace(meant.busy, active_prefill_tokens_threshold=7),
        queue=msgspec.structs.replace(meant.queue, policy="wspt"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heat: 1", "unknown field 'heat'; fields are: mode, selection_policy"),
        ("queue: {classes: [{name: default}, {label: x}]}", "queue.classes[1]: unknown field 'label'; fields are: "),
        ("busy: {decode: 1}", "busy: unknown field 'decode'; fields are: active_decode_blocks_threshold"),
        ("temperature: -1", "temperature: must be a number from 0 to 1000000"),
        ("temperature: .nan", "temperature: must be a finite number, got nan"),
        (
            "busy: {active_decode_blocks_threshold: 1.5}",
            "busy.active_decode_blocks_threshold: must be a number from 0 to 1",
        ),
        ("queue: {classes: []}", "queue: missing queue class: 'default' with uncached_tokens_min 0 is required"),
        ("queue: {classes: [{quantum: 0}]}", "queue.classes[0].quantum: must be a whole number from 1"),
        ("mode: fastest", "unknown router mode 'fastest'; router modes are: kv, "),
        ("[1]", "expected fields of the router configuration, got a list"),
        ("{", "policy.yaml: "),
        ("temperature: " + "9" * 5_000, "policy.yaml: Exceeds the limit"),
        ("a: " + "[" * 100_000 + "]" * 100_000, "policy.yaml: the policy file has more than 16 levels"),
        ("a: &a {mode: kv}\nb:\n  <<: [*a, *a]", "policy.yaml: YAML aliases are not supported, got *a"),
        ("#" * (1 << 20) + "\nmode: kv", "larger than 1048576 bytes"),
    ],
)
def test_error_names_the_file_and_the_invalid_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    error = error_line("--router-policy-config", str(path))
    assert str(path) in error
    assert message in error


def test_missing_and_malformed_files_are_rejected(tmp_path: Path) -> None:
    assert "No such file" in error_line("--router-policy-config", str(tmp_path / "none.yaml"))
    path = tmp_path / "policy.json"
    path.write_bytes(b"temperature: 1")
    assert f"{path}: JSON is malformed" in error_line("--router-policy-config", str(path))
    path.write_bytes(b"[" * 100_000)
    assert f"{path}: the policy file has more than 16 levels" in error_line("--router-policy-config", str(path))
    path.write_bytes(b"\xff")
    assert str(path) in error_line("--router-policy-config", str(path))


PAGE = (Path(__file__).resolve().parents[2] / "docs/router-config.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}[^\n]*\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_help_describes_options_instead_of_fields() -> None:
    texts = " ".join(option.help for option in ROUTER_OPTIONS.values())
    assert re.findall(r"\bnull\b|\w+_s\b|[a-z][A-Z]\w*|The same", texts) == []


def test_every_flag_is_documented_with_its_default_and_field() -> None:
    rows = re.findall(
        r"^\| `--(\[no-\])?(router-[a-z-]+|active-[a-z-]+|load-aware|enforce-disagg|shared-cache-[a-z-]+|tier-credit)`"
        r" \| (.*?) \| (.*?) \|",
        PAGE,
        re.MULTILINE,
    )
    shown = {f"--{flag}": (default.strip("` "), field.strip("` ")) for _, flag, default, field in rows}
    assert set(shown) == {option.flag(name) for name, option in ROUTER_OPTIONS.items()}
    for name, option in ROUTER_OPTIONS.items():
        default, field = shown[option.flag(name)]
        assert (default.split(",")[0], field) == (option.default_text, option.path)


def test_the_example_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(block("yaml"))
    config = read_policy_file(path)
    assert config.queue.policy == "wspt"
    assert config.queue.classes[1] == QueueClass(uncached_tokens_min=16_384, quantum=4_096)


def test_the_example_policy_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "bounded.py").write_text(block("python"))
    require_policy("bounded.Bounded")
