"""`forebay replay at`, `replay diff` and `explain` on a log with disaggregation: pools, stages and waits."""

import asyncio
import json
from pathlib import Path

import pytest

from forebay.events.control import DisaggConfig
from forebay.events.progress import FirstTokenEmitted, PrefillFinished
from tests.cli.logs import invoke
from tests.core.worlds import PROMPTS, request
from tests.replay.disagg_history import history
from tests.replay.recorder import disaggregated


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log with a request whose KV is retained while it waits for a decode worker."""
    made = disaggregated("p", disagg=DisaggConfig(enforce=True))
    made("requests", request("r", PROMPTS[0]))
    for name in "de":
        made.lose(name)
    made.progress("r", PrefillFinished)
    made.seal()
    path = tmp_path_factory.mktemp("disagg") / "disaggregated.db"
    asyncio.run(made.log(path)).close()
    return path


def shown(*arguments: str) -> str:
    run = invoke(*arguments)
    assert run.exit_code == 0, run.stderr
    return " ".join(run.stdout.split())


def test_disagg_pools_and_retained_kv_are_shown(path: Path) -> None:
    text = shown("replay", "at", str(path))
    assert "m, for decode, blocks of 4 tokens" in text
    assert "m, for prefill, blocks of 4 tokens" in text
    assert "prompts computed remotely: always enforce=True" in text
    assert "r waiting KV at p" in text


def test_disagg_transfers_show_the_holder_and_the_fetching_worker(tmp_path: Path) -> None:
    made = disaggregated("p", disagg=DisaggConfig(enforce=True))
    made("requests", request("r", PROMPTS[0]))
    made.lose("e")
    made.progress("r", PrefillFinished)
    made.seal()
    asyncio.run(made.log(tmp_path / "disaggregated.db")).close()
    assert "r transfer d/0, KV at p" in shown("replay", "at", str(tmp_path / "disaggregated.db"))


def test_disagg_parts_of_the_time_to_first_token_are_shown(tmp_path: Path) -> None:
    made = disaggregated("p")
    made("requests", request("r", PROMPTS[0]))
    made.progress("r", PrefillFinished, after_us=18_600)
    made.progress("r", FirstTokenEmitted, after_us=9_100, transferred_bytes=34_000, transfer_us=900)
    made.seal()
    path = tmp_path / "disaggregated.db"
    asyncio.run(made.log(path)).close()
    text = shown("explain", str(path), "r")
    parts = "of this: prefill 18.6 ms, KV transfer 900 us, network and first decode step 8.2 ms"
    assert f"time to first token 0.028 s on the owner's clock {parts}" in text
    output = json.loads(shown("explain", str(path), "r", "--json"))
    assert output["first_token"]["parts_us"] == {"prefill": 18_600, "transfer": 900, "decode": 8_200}


def test_disagg_stages_are_explained(path: Path) -> None:
    text = shown("explain", str(path), "r")
    assert "prefill sent to p: it was the only candidate; prompt computed by a prefill worker" in text
    assert "it keeps their KV, 34,000 bytes for 0.5 s" in text
    assert text.startswith("request r: waiting")


@pytest.fixture(scope="module")
def operator_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log of a router with the policy `always` that an operator changes to `never`."""
    path = tmp_path_factory.mktemp("by-hand") / "disaggregated.db"
    asyncio.run(history("always", by_hand="never").log(path)).close()
    return path


def test_disagg_the_alternative_overrides_operator_settings(operator_log: Path, tmp_path: Path) -> None:
    named = json.loads(shown("replay", "diff", str(operator_log), "--set", "disagg.policy=always", "--json"))
    assert not named["identical"]
    assert (named["idle"], named["undone"]) == ([], ["disagg.policy"])
    file = tmp_path / "policy.yaml"
    file.write_text("disagg:\n  policy: always\n")
    in_file = json.loads(shown("replay", "diff", str(operator_log), "--policy-config", str(file), "--json"))
    assert (in_file["identical"], in_file["idle"]) == (False, [])
    file.write_text("temperature: 0.0\n")
    other = json.loads(shown("replay", "diff", str(operator_log), "--policy-config", str(file), "--json"))
    assert (other["identical"], other["undone"]) == (True, [])
    same = json.loads(shown("replay", "diff", str(operator_log), "--set", "disagg.policy=never", "--json"))
    assert (same["identical"], same["undone"]) == (True, [])
    assert "An operator changed disagg.policy during the recording" in shown(
        "replay", "diff", str(operator_log), "--set", "disagg.policy=always"
    )


def test_disagg_selections_in_recorded_states_keep_their_stage(operator_log: Path) -> None:
    for given in ("disagg.policy=always", "disagg.max_local_prefill_length=1"):
        report = json.loads(shown("replay", "diff", str(operator_log), "--set", given, "--json"))
        assert report["stages_kept"], given
    assert not json.loads(shown("replay", "diff", str(operator_log), "--set", "temperature=1", "--json"))["stages_kept"]
    text = shown("replay", "diff", str(operator_log), "--set", "disagg.policy=always")
    assert "Each repeated decision keeps its stage" in text
