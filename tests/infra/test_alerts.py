"""Each alert of infra/prometheus fires for the fault that it names, and docs/operations.md says what to do.

Without Debian's package `prometheus` the tests that evaluate rules are skipped with the reason, or fail if
FOREBAY_REQUIRE_PROMETHEUS=1.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import parse
from tests.dashboard import metrics
from tests.harness.prometheus import problems, require_prometheus, rule_failures

ROOT = Path(__file__).resolve().parent.parent.parent
ALERTS = ROOT / "infra/prometheus/alerts.yaml"
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
}
PAGE = (ROOT / "docs/operations.md").read_text()
PARTS = ("**Meaning.**", "**First look.**", "**What to do.**")

# Series as promtool writes them: start value, increment and number of samples, one per minute. Of each alert, series
# that fire after 30 minutes, and series that do not.
OWNER = 'model="m", instance="r:1"'
SERIES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "ForebayProcessDown": ({'up{job="router", instance="r:1"}': "0x40"}, {'up{job="router", instance="r:1"}': "1x40"}),
    "ForebayNoOwner": (
        {'forebay_owner_heartbeat_age_seconds{group="m"}': "3+60x40"},
        {
            'forebay_owner_heartbeat_age_seconds{group="m", instance="i:1"}': "0.4x40",
            'forebay_owner_heartbeat_age_seconds{group="m", instance="i:2"}': "9x40",  # one ingress without Kafka
        },
    ),
    "ForebayNoStandby": (
        {'forebay_group_standbys{group="m"}': "0x40"},
        {
            'forebay_group_standbys{group="m", instance="i:1"}': "1x40",
            'forebay_group_standbys{group="m", instance="i:2"}': "0x40",
        },
    ),
    "ForebayWorkerNotMember": (
        {'forebay_worker_member{worker_id="w"}': "0x40"},
        {'forebay_worker_member{worker_id="w"}': "1x40"},
    ),
    "ForebayWorkersRejected": (
        {f'forebay_owner_workers_refused_total{{{OWNER}, reason="roles"}}': "_x25 1x15"},
        {f'forebay_owner_workers_refused_total{{{OWNER}, reason="roles"}}': "1x40"},
    ),
    "ForebayRequestsFail": (
        {'forebay_ingress_refused_total{code="no_owner"}': "0+60x40"},
        {'forebay_ingress_refused_total{code="invalid_request"}': "0+60x40"},
    ),
    "ForebayOverloaded": (
        {'forebay_ingress_refused_total{code="queue_full"}': "0+60x40"},
        {'forebay_ingress_refused_total{code="queue_full"}': "0+1x40"},
    ),
    "ForebayDeadLetters": (
        {'forebay_worker_items_skipped_total{worker_id="w", reason="dead_letter"}': "0x25 1x15"},
        {'forebay_worker_items_skipped_total{worker_id="w", reason="other_epoch"}': "0x25 1x15"},
    ),
    "ForebayForeignRecords": (
        {f"forebay_owner_foreign_records_total{{{OWNER}}}": "0x25 1x15"},
        {f"forebay_owner_foreign_records_total{{{OWNER}}}": "7x40"},
    ),
    "ForebayRecordsDropped": (
        {'forebay_kafka_refused_records_total{instance="i:1"}': "0x25 1x15"},
        {f"forebay_owner_unsent_records_total{{{OWNER}}}": "3x40"},
    ),
    "ForebayLeaseFaults": (
        {f"forebay_owner_lease_faults_total{{{OWNER}}}": "0x25 1x15"},
        {f"forebay_owner_lease_faults_total{{{OWNER}}}": "1x40"},
    ),
    "ForebayReadersBehind": (
        {'forebay_kafka_consumer_lag{topic="requests", partition="0"}': "20000x40"},
        {'forebay_kafka_consumer_lag{topic="requests", partition="0"}': "20000x28 0x12"},
    ),
    "ForebaySlowLog": (
        {
            'forebay_hop_seconds_bucket{topic="requests", le="0.5"}': "0+1x40",
            'forebay_hop_seconds_bucket{topic="requests", le="1.0"}': "0+10x40",
            'forebay_hop_seconds_bucket{topic="requests", le="+Inf"}': "0+10x40",
        },
        {
            'forebay_hop_seconds_bucket{topic="requests", le="0.5"}': "0+10x40",
            'forebay_hop_seconds_bucket{topic="requests", le="+Inf"}': "0+10x40",
        },
    ),
    "ForebaySnapshotOld": (
        {
            f"forebay_owner_snapshot_age_seconds{{{OWNER}}}": "600+60x40",
            f"forebay_owner_journal_records_total{{{OWNER}}}": "0+5x40",
        },
        {  # an idle group takes no snapshot
            f"forebay_owner_snapshot_age_seconds{{{OWNER}}}": "600+60x40",
            f"forebay_owner_journal_records_total{{{OWNER}}}": "9x40",
        },
    ),
    "ForebayClockAhead": (
        {f"forebay_owner_clock_ahead_seconds{{{OWNER}}}": "30x40"},
        {f"forebay_owner_clock_ahead_seconds{{{OWNER}}}": "0.2x40"},
    ),
    "ForebayLogTooLarge": (
        {"forebay_log_bytes": "130x40", "forebay_log_limit_bytes": "100x40"},
        {"forebay_log_bytes": "110x40", "forebay_log_limit_bytes": "100x40"},
    ),
    "ForebaySnapshotDamaged": (
        {"forebay_log_snapshots_refused_total": "0x25 1x15"},
        {"forebay_log_snapshots_refused_total": "0x40"},
    ),
    "ForebayFileDescriptors": (
        {"process_open_fds": "90x40", "process_max_fds": "100x40", "forebay_build_info": "1x40"},
        {"process_open_fds": "90x40", "process_max_fds": "100x40"},  # a process that is not forebay's
    ),
}


def section(alert: str) -> str:
    _, _, rest = PAGE.partition(f"### {alert}\n")
    return re.split(r"^#{1,3} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("alert", RULES)
def test_each_alert_has_a_section(alert: str) -> None:
    text = section(alert)
    places = [text.find(part) for part in PARTS]
    assert places == sorted(places), f"the parts of {alert} are in order"
    assert min(places) >= 0, f"{alert} lacks one of {PARTS}"
    assert RULES[alert]["labels"]["severity"] in ("page", "ticket")
    assert RULES[alert]["annotations"]["summary"]


def test_each_section_is_about_an_alert() -> None:
    assert re.findall(r"^### (Forebay\w+)$", PAGE, re.MULTILINE) == list(RULES)


@pytest.mark.parametrize("alert", RULES)
def test_alerts_use_existing_metrics(alert: str) -> None:
    sources = [path for root in ("streams", "services") for path in (ROOT / root).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    # Tables of metrics name them without the prefix of their service.
    stems = {re.sub(r"^forebay_|_(total|bucket)$", "", name) for name in metrics(RULES[alert]["expr"])}
    assert {stem for stem in stems if not re.search(rf'"(forebay_)?{stem}"', text)} == set()


def test_the_rules_are_valid() -> None:
    require_prometheus()
    assert problems("rules", str(ALERTS)) == []


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_fires_for_its_fault_only(alert: str, tmp_path: Path) -> None:
    require_prometheus()
    fault, healthy = SERIES[alert]
    assert rule_failures(tmp_path, ALERTS, alert, fault, fires=True) == []
    assert rule_failures(tmp_path, ALERTS, alert, healthy, fires=False) == []


def test_rejection_codes_of_the_alerts_exist() -> None:
    sources = [path for root in ("streams", "services", "schemas") for path in (ROOT / root).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    codes = {
        code
        for rule in RULES.values()
        for found in re.findall(r'code=~"([^"]+)"', rule["expr"])
        for code in found.split("|")
    }
    assert codes
    assert {code for code in codes if f'"{code}"' not in text} == set()


def commands() -> list[list[str]]:
    """Return the forebay commands in the examples of the page, without `forebay`."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("forebay ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_the_commands_of_the_page_parse(arguments: list[str]) -> None:
    assert parse(arguments)
