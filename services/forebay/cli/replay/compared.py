"""Comparison of a recorded span with the configuration that the options of a command define."""

from dataclasses import dataclass

from forebay.cli.policies.alternative import Alternative
from forebay.cli.policies.pool_rules import PoolRuleOptions
from forebay.replay.diff.diff import diff
from forebay.replay.diff.other_rules import OtherPoolRules
from forebay.replay.diff.report import DiffReport
from forebay.replay.diff.span import Span
from forebay.replay.verify.verify import OnProgress
from forebay.transport.base import Log
from forebay.transport.history.groups import pools_of


@dataclass(frozen=True, slots=True)
class Compared:
    """Configuration and rules for the choice of pools with which a recorded span is compared."""

    other: Alternative
    options: PoolRuleOptions
    rules: OtherPoolRules

    async def report(self, log: Log, partition: int, span: Span, on_progress: OnProgress) -> DiffReport:
        pools = await pools_of(log, partition)
        self.other.require_pools(pools)
        self.options.require_pools(self.rules, pools)
        report = await diff(log, partition, self.other.of, on_progress, self.other.named, self.rules, span)
        report.alternative = f"{self.other} {self.options}".strip()
        report.idle = self.other.idle(pools, report.undone)
        return report
