"""`forebay replay` on a log of prefill and decode apart: what people are shown of its pools, stages and waits."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.events.control import DisaggConfig
from forebay.events.progress import PrefillFinished
from tests.core.worlds import PROMPTS, request
from tests.replay.test_diff_disagg import history
from tests.replay.test_explain_disagg import apart, lose, said


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A request whose KV is kept, and waits for a decode worker."""
    made = apart("p", disagg=DisaggConfig(enforce=True))
    made("requests", request("r", PROMPTS[0]))
    for name in "de":
        lose(made, name)
    said(made, PrefillFinished)
    made.seal()
    path = tmp_path_factory.mktemp("disagg") / "apart.db"
    asyncio.run(made.log(path)).close()
    return path


def shown(*arguments: str) -> str:
    run = CliRunner().invoke(app, ["replay", *arguments])
    assert run.exit_code == 0, run.stderr
    return " ".join(run.stdout.split())


def test_disagg_pools_and_kept_kv_at_a_moment(path: Path) -> None:
    text = shown("at", str(path))
    assert "m, for decode, blocks of 4 tokens" in text
    assert "m, for prefill, blocks of 4 tokens" in text
    assert "prompts computed remotely: always enforce=True" in text
    assert "r waiting KV at p" in text


def test_who_keeps_the_kv_is_shown_beside_who_fetches_it_in_disagg(tmp_path: Path) -> None:
    made = apart("p", disagg=DisaggConfig(enforce=True))
    made("requests", request("r", PROMPTS[0]))
    lose(made, "e")
    said(made, PrefillFinished)
    made.seal()
    asyncio.run(made.log(tmp_path / "apart.db")).close()
    assert "r transfer d/0, KV at p" in shown("at", str(tmp_path / "apart.db"))


def test_disagg_stages_are_explained(path: Path) -> None:
    text = shown("explain", str(path), "r")
    assert "sent to be prefilled to p: the only one that could take it; its prompt is computed remotely" in text
    assert "it keeps their KV, 34,000 bytes for 0.5 s" in text
    assert text.startswith("request r: waiting")


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A router that starts with `always`, and an operator who then says `never`."""
    path = tmp_path_factory.mktemp("by-hand") / "apart.db"
    asyncio.run(history("always", by_hand="never").log(path)).close()
    return path


def test_disagg_what_is_named_wins_over_what_was_set_by_hand(by_hand: Path, tmp_path: Path) -> None:
    named = json.loads(shown("diff", str(by_hand), "--set", "router.disagg.policy=always", "--json"))
    assert not named["identical"]
    assert (named["idle"], named["undone"]) == ([], ["router.disagg.policy"])
    file = tmp_path / "policy.yaml"
    file.write_text("disagg:\n  policy: always\n")
    in_file = json.loads(shown("diff", str(by_hand), "--router-policy-config", str(file), "--json"))
    assert (in_file["identical"], in_file["idle"]) == (False, [])
    file.write_text("temperature: 0.0\n")
    other = json.loads(shown("diff", str(by_hand), "--router-policy-config", str(file), "--json"))
    assert (other["identical"], other["undone"]) == (True, [])
    same = json.loads(shown("diff", str(by_hand), "--set", "router.disagg.policy=never", "--json"))
    assert (same["identical"], same["undone"]) == (True, [])
    assert "router.disagg.policy was set otherwise by an operator later" in shown(
        "diff", str(by_hand), "--set", "router.disagg.policy=always"
    )


def test_disagg_a_closed_loop_that_is_refused_is_not_offered(by_hand: Path, tmp_path: Path) -> None:
    page, given = tmp_path / "page.html", ("--set", "router.disagg.policy=always")
    text = shown("diff", str(by_hand), *given, "--html", str(page))
    for told in (text, page.read_text()):
        assert "--closed-loop does not simulate recordings of workers that only prefill or only decode" in told
        assert "simulates both from the fork on" not in told
    run = CliRunner().invoke(app, ["replay", "diff", str(by_hand), *given, "--closed-loop"])
    assert run.exit_code == 2
    assert "not modelled from recordings" in run.stderr


def test_disagg_choices_in_historys_own_state_keep_their_stage(by_hand: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for given in ("router.disagg.policy=always", "router.disagg.max_local_prefill_length=1"):
        report = json.loads(shown("diff", str(by_hand), "--set", given, "--json"))
        assert report["stages_kept"], given
    assert not json.loads(shown("diff", str(by_hand), "--set", "router.temperature=1", "--json"))["stages_kept"]
    text = shown("diff", str(by_hand), "--set", "router.disagg.policy=always", "--html", str(page))
    for told in (text, page.read_text()):
        assert "Each choice keeps its stage there" in told
