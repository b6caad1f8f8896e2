"""Versions of the decision rules in one simulation, so that routers can be upgraded and rolled back.

All simulated processes share one interpreter. Before the scheduler runs callbacks of a process that has other rules
than the process before it, `Rules.use` replaces the version and the cost rule in all modules that import them.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType, TracebackType

from msgspec.structs import replace as with_changes

from forebay.core.routing.cost import CostTable, Demand, cost_table
from forebay.core.state.roster import Roster
from forebay.core.world import CORE_VERSION
from forebay.events.control import RouterConfig

OWN_RULES = CORE_VERSION
OTHER_RULES = CORE_VERSION + 1


def other_cost_table(config: RouterConfig, block_size: int, roster: Roster, demand: Demand) -> CostTable:
    """Return the costs under the other rules: each request in flight on a candidate costs five blocks more.

    So the cheapest candidate is another one wherever overlap and load contradict each other.
    """
    weight = config.decode_active_request_weight + 5.0
    return cost_table(with_changes(config, decode_active_request_weight=weight), block_size, roster, demand)


class Rules(AbstractContextManager["Rules"]):
    """Replaces the decision rules of this interpreter. The context manager restores its own rules at the end."""

    def __init__(self) -> None:
        self._version = OWN_RULES
        self._versions: list[ModuleType] = []
        self._costs: list[ModuleType] = []

    def use(self, version: int) -> None:
        """Let all modules have this version of the rules, `OWN_RULES` or `OTHER_RULES`."""
        if version == self._version:
            return
        if not self._versions:
            self._find_modules()
        rule: Callable[..., CostTable] = cost_table if version == OWN_RULES else other_cost_table
        for module in self._versions:
            module.CORE_VERSION = version  # type: ignore[attr-defined]
        for module in self._costs:
            module.cost_table = rule  # type: ignore[attr-defined]
        self._version = version

    def _find_modules(self) -> None:
        modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("forebay.")]
        self._versions = [module for module in modules if hasattr(module, "CORE_VERSION")]
        self._costs = [module for module in modules if getattr(module, "cost_table", None) is cost_table]
        assert self._costs

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.use(OWN_RULES)
