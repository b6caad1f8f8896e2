"""`--set`, `--policy` and `--policy-config` give an alternative configuration or a one-line error."""

import re
from pathlib import Path

import msgspec
import pytest

from forebay.cli.policies.alternative import Alternative, AlternativeOptions
from forebay.events.control import PoolConfigured, QueueClass, QueueConfig, RouterConfig
from forebay.ingress.errors import Unusable

POOL = PoolConfigured(pool="default", model="m", block_size=16, router=RouterConfig(temperature=0.5))


def error_line(*sets: str, policy: str | None = None, policy_config: Path | None = None) -> str:
    with pytest.raises(Unusable) as caught:
        AlternativeOptions(list(sets), policy, policy_config).alternative()
    (line,) = str(caught.value).splitlines()
    return line


def parse_sets(*sets: str) -> Alternative:
    return AlternativeOptions(list(sets)).alternative()


def test_set_changes_only_the_named_settings() -> None:
    changed = parse_sets(
        "prefill_load_scale=2",
        "use_kv_events=false",
        "queue.threshold=1.5",
        "busy.active_prefill_tokens_threshold=100",
        "attempts_max=5",
    ).of(POOL)
    router = msgspec.structs.replace(
        POOL.router,
        prefill_load_scale=2.0,
        use_kv_events=False,
        queue=QueueConfig(threshold=1.5),
        busy=msgspec.structs.replace(POOL.router.busy, active_prefill_tokens_threshold=100),
    )
    assert changed == msgspec.structs.replace(POOL, router=router, attempts_max=5)


def test_lists_and_null_are_json() -> None:
    one = parse_sets('queue.classes=[{"name": "default", "quantum": 5}]', "queue.threshold=null")
    assert one.of(POOL).router.queue == QueueConfig(classes=(QueueClass(quantum=5),))


def test_policy_sets_the_mode() -> None:
    assert AlternativeOptions(policy="round-robin").alternative().of(POOL).router == RouterConfig(
        mode="round-robin", temperature=0.5
    )


def test_a_policy_file_replaces_recorded_settings_and_flags_override_it(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("mode: least-loaded\nttl_s: 7\n")
    one = AlternativeOptions(["ttl_s=9"], policy_config=file).alternative()
    assert one.of(POOL).router == RouterConfig(mode="least-loaded", ttl_s=9.0)
    assert str(one) == f"--policy-config {file} --set ttl_s=9"


def test_a_setting_can_name_a_pool() -> None:
    one = parse_sets("a:b:temperature=0.1")
    other = msgspec.structs.replace(POOL, pool="a:b")
    assert one.of(POOL) == POOL
    assert one.of(other).router.temperature == 0.1
    one.require_pools([POOL, other])
    with pytest.raises(Unusable, match="unknown pool 'a:b'; pools are: default"):
        one.require_pools([POOL])


def test_settings_without_effect_are_reported() -> None:
    one = parse_sets("temperature=0.5", "ttl_s=3")
    assert one.idle([POOL]) == ["--set temperature=0.5"]
    assert one.idle([POOL, msgspec.structs.replace(POOL, router=RouterConfig())]) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature", "expected PATH=VALUE"),
        ("=1", "unknown field ''; fields are: mode, .*attempts_max"),
        ("x=1", "unknown field 'x'; fields are: mode, "),
        ("router.temperature=1", "did you mean temperature"),
        ("busy=1", "is a group of fields; set one of busy.active_decode_blocks_threshold, "),
        ("block_size=1", "unknown field 'block_size'"),
        ("temperature=-1", "expected a number from 0 to 1000000$"),
        ("temperature=nan", "expected a number from 0 to 1000000$"),
        ("ttl_s=1e999", "expected a number from 0 to 31536000$"),
        ("queue.threshold=x", "expected a number from 0 to 1000000 or null$"),
        ("approximate_blocks_max=0", "expected a whole number from 1 to 1073741824$"),
        ("attempts_max=0", "expected a whole number of at least 1$"),
        ("track_prefill_tokens=maybe", "expected true or false$"),
        ("selection_policy=x", "expected one of default, lmetric$"),
        ("mode=kw", "unknown router mode 'kw'"),
        ("queue.classes=3", "expected a JSON list of objects"),
        ('queue.classes=[{"name": "default", "size": 1}]', r"\[0\]: unknown field 'size'; fields are: name, "),
        ('queue.classes=[{"name": "default", "quantum": 0}]', r"`int` >= 1 - at `\$\[0\].quantum`"),
        ('queue.classes=[{"name": "a"}]', "missing queue class"),
    ],
)
def test_unknown_and_invalid_settings_are_rejected(text: str, message: str) -> None:
    line = error_line(text)
    assert line.startswith(f"--set {text}: ")
    assert re.search(message, line), line


def test_missing_duplicate_and_unusable_settings_are_rejected(tmp_path: Path) -> None:
    assert "no change; pass" in error_line()
    assert "set the same field" in error_line("mode=kv", policy="kv")
    assert error_line(policy="no.such.Policy").startswith("--policy no.such.Policy: ")
    file = tmp_path / "policy.json"
    file.write_text('{"mode": "no.such.Policy"}')
    assert error_line(policy_config=file).startswith(f"--policy-config {file}: ")
