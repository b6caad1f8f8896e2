"""`forebay explain` on a terminal and as JSON, on logs and on slices of them."""

import asyncio
import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import Result

from forebay.core.block_hashes import extend_chain
from forebay.events.base import pack_u64
from forebay.events.control import QueueConfig
from forebay.events.kv import StoreBlocksAdded
from forebay.events.progress import FirstTokenEmitted, OnboardedTokens, RequestFinished
from forebay.events.requests import RequestCancelled, RoutingHints
from forebay.events.topics import DECISIONS
from forebay.replay.explain.explanation import Explanation
from tests.cli.logs import invoke
from tests.core.worlds import PROMPTS, joined, pool, query, request
from tests.replay.mutations import replace_record
from tests.replay.recorder import Recorder

MANY = 300  # workers
DEEP = 1_500  # blocks per prompt


def explain(*arguments: str | Path) -> Result:
    return invoke("explain", *arguments)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    made = Recorder()
    made.fleet("a", "b", temperature=0.5, queue=QueueConfig(threshold=0.25))
    made("requests", request("req-1", PROMPTS[0], at_us=100, routing=RoutingHints(worker_id="a", priority=3)))
    made.progress("req-1", FirstTokenEmitted, after_us=500_000, cached_tokens=0, at_us=900)
    made.progress("req-1", RequestFinished, finish_reason="stop", output_tokens=7)
    made("requests", request("req-2", PROMPTS[1]))
    made.snapshot()
    made("requests", request("req-3", PROMPTS[2]))
    made("requests", request("req-4", PROMPTS[2], routing=RoutingHints(worker_id="nobody")))
    made("requests", request("req-5", PROMPTS[2]))
    made("requests", RequestCancelled(request_id="req-5", reason="\x1b[2Jgone"))
    made("requests", query("ask", PROMPTS[0]))
    made.progress("req-2", FirstTokenEmitted)
    return write(made, tmp_path / "log.db")


def write(made: Recorder, path: Path) -> Path:
    async def run() -> None:
        (await made.log(path)).close()

    asyncio.run(run())
    return path


def test_a_timeline_is_shown_as_text(log: Path) -> None:
    output = explain(log, "req-1")
    assert output.exit_code == 0, output.output
    lines = output.stdout.splitlines()
    assert lines[0] == "request req-1: finished (stop) after 0.500 s, 7 output tokens"
    assert "34 prompt tokens in 8 full blocks, at most 2 output tokens, deadline after 1 s" in lines[1]
    assert "hints: worker_id a, priority 3" in lines
    assert "    +0.000 s  routed to a: the request is pinned to it" in lines
    assert "              kv: temperature 0.5, queue_threshold 0.25" in lines
    assert any(line.split()[:3] == ["*", "a", "16.50"] for line in lines)
    assert "              excluded b/0: the request is pinned to a" in lines
    assert "    +0.500 s  finished (stop) with 7 output tokens" in lines
    assert "time to first token 0.500 s on the owner's clock (0.001 s on the clocks of ingress and worker)" in lines
    assert lines[-1] == "verified: journal offsets 0 to 2 derived again, every record equal"


def test_queries_and_aborted_requests_are_explained(log: Path) -> None:
    assert "held in queue class default, 0 requests ahead: " in explain(log, "req-5").stdout
    cancelled = explain(log, "req-5").stdout
    assert "aborted (cancelled): \\x1b[2Jgone" in cancelled
    assert "\x1b" not in cancelled
    assert "excluded a/0, b/0: the request is pinned to nobody" in explain(log, "req-4").stdout
    assert "would be held, then routed to" in explain(log, "ask").stdout
    last = explain(log, "req-2").stdout
    assert last.startswith("request req-2: decode\n")
    assert "(on the log, not in the journal yet)" in " ".join(last.split())
    assert "drawn at temperature 0.5" in explain(log, "req-3").stdout


def test_json_output_is_one_object(log: Path) -> None:
    output = explain(log, "req-3", "--json")
    assert output.exit_code == 0
    explanation = msgspec.json.decode(output.stdout, type=Explanation)
    assert (explanation.request_id, explanation.state) == ("req-3", "prefill")
    assert explanation.derived_from > 0, "derived from the snapshot before it"
    assert json.loads(output.stdout)["routings"][0]["candidates"][0]["seen"]["worker_id"] == "a"


def test_explanations_from_a_slice_are_equal(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "slice.db"
    assert invoke("record", log, out).exit_code == 0
    assert explain(out, "req-3").stdout == explain(log, "req-3").stdout


def test_invalid_arguments_are_rejected(log: Path, tmp_path: Path) -> None:
    missing = explain(log, "req-")
    near = "req-5 or req-4 or req-3"
    assert (missing.exit_code, missing.stderr) == (
        2,
        f"forebay: {log}: unknown request 'req-'; did you mean {near}?\n",
    )
    assert explain(log, "other").stderr == f"forebay: {log}: unknown request 'other'; check the ID\n"
    assert (explain("req-1").exit_code, explain("req-1").stderr) == (
        2,
        "forebay: expected LOG and REQUEST, or REQUEST and --kafka\n",
    )
    foreign = tmp_path / "foreign.db"
    foreign.write_text("this is no log")
    refused = explain(foreign, "req-1")
    assert (refused.exit_code, "foreign.db" in refused.stderr) == (2, True)


def test_explanation_ends_at_a_divergence(log: Path) -> None:
    digest = re.compile(rb'(?<="table_digest":")[0-9a-f]{16}')
    replace_record(log, DECISIONS, 1, lambda value: digest.sub(b"0" * 16, value))
    output = explain(log, "req-1")
    assert output.exit_code == 1
    assert output.stdout.startswith("request req-1: unknown\n")
    assert "DIVERGENCE at journal offset 1, before this request: differs in table_digest" in output.stdout
    assert "routed to" not in output.stdout
    assert json.loads(explain(log, "req-1", "--json").stdout)["divergence"]["offset"] == 1


def test_a_large_fleet_and_a_long_prompt_stay_readable(tmp_path: Path) -> None:
    made = Recorder()
    made.fleet(*(f"w{number:03}" for number in range(MANY)))
    blocks = extend_chain(None, list(range(DEEP)))
    made("requests", request("x", blocks[:700]))
    made("requests", request("r", blocks))
    pinned = RoutingHints(allowed_workers=tuple(f"w{number:03}" for number in range(2, 20)))
    made("requests", request("p", blocks, routing=pinned))
    log = write(made, tmp_path / "log.db")
    lines = explain(log, "r").stdout.splitlines()
    assert len(lines) < 30
    assert sum(line.lstrip().startswith(("w", "*")) for line in lines) == 10
    assert any(line.strip().startswith("290 more candidates with costs up to ") for line in lines)
    assert max(map(len, lines)) <= 120
    assert len(explain(log, "r", "--all").stdout.splitlines()) > MANY
    some = " ".join(explain(log, "p").stdout.split())
    assert (
        "excluded w000/0, w001/0, w020/0, w021/0, w022/0, w023/0 and 276 more: it is not in the request's allowed"
        in some
    )


def test_a_reused_id_is_reported(tmp_path: Path) -> None:
    made = Recorder()
    made.fleet("a")
    for number in range(2):
        made("requests", request("r", PROMPTS[0], nonce=number))
        made.progress("r", RequestFinished, finish_reason="stop")
        made.wait(200_000_000)
        made("requests", request(f"x{number}", PROMPTS[0]))
    assert "the ID was used once before; this is the last use" in explain(write(made, tmp_path / "l.db"), "r").stdout


def test_the_sources_of_a_prompt_are_shown_as_text(tmp_path: Path) -> None:
    made = Recorder()
    made("control", pool())
    for slot, name in enumerate("ab"):
        made("fleet", joined(name, slot, kv_store="s" if name == "a" else ""))
    made("kv-events", StoreBlocksAdded(store="s", worker_id="a", sequence_hashes=pack_u64(PROMPTS[0][:3])))
    made("requests", request("r", PROMPTS[0]))
    loads = (OnboardedTokens(tier="store", tokens=12, us=4_000),)
    made.progress("r", FirstTokenEmitted, cached_tokens=16, onboarded=loads)
    made.seal()
    output = explain(write(made, tmp_path / "tiers.db"), "r")
    assert output.exit_code == 0, output.output
    lines = output.stdout.splitlines()
    (header,) = [line for line in lines if "in store" in line]
    assert "on disk" not in header
    assert any(line.split()[:2] == ["*", "a"] and " 3 " in line for line in lines)
    assert "prompt tokens: 4 cached on the device, 12 from the shared store, 18 computed" in lines
