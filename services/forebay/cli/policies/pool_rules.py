"""Options that replace the recorded rules for the choice of pools: `--pool-routing FILE`, `--no-canaries`."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from forebay.cli.common.options import Option
from forebay.events.control import PoolConfigured
from forebay.events.names import unknown_name
from forebay.ingress.errors import Unusable
from forebay.simulate.pool_routing_file import PoolRoutingUnusable, read_pool_routing

if TYPE_CHECKING:
    from forebay.replay.diff.counterfactual_world import OtherPoolRules


@dataclass(frozen=True, slots=True)
class PoolRuleOptions:
    """Options that replace the recorded rules for the choice of pools. Each field is a command-line option."""

    pool_routing: Annotated[
        Path | None, Option(help="TOML file with grids that replace the recorded grids of its models.")
    ] = None
    no_canaries: Annotated[bool, Option("--no-canaries", help="Let no pool be a canary.")] = False

    def rules(self) -> "OtherPoolRules":
        """Return the rules that replace recorded rules. Raises Unusable if the file is invalid."""
        from forebay.replay.diff.counterfactual_world import OtherPoolRules  # noqa: PLC0415 - --help does not wait for a router

        try:
            routing = {} if self.pool_routing is None else read_pool_routing(self.pool_routing)
        except PoolRoutingUnusable as error:
            raise Unusable(f"--pool-routing: {error}") from error
        return OtherPoolRules(routing, without_canaries=self.no_canaries)

    def require_pools(self, rules: "OtherPoolRules", pools: Iterable[PoolConfigured]) -> None:
        """Raise Unusable if the file names a model or pool that is not among `pools`."""
        recorded = list(pools)
        models = sorted({pool.model for pool in recorded})
        for model, routing in rules.routing.items():
            if model not in models:
                raise Unusable(f"--pool-routing {self.pool_routing}: {unknown_name('model', model, models)}")
            for grid in routing.grids:
                known = sorted({one.pool for one in recorded if (one.model, one.role) == (model, grid.role)})
                for name in (one.pool for one in grid.pools):
                    if name not in known:
                        kind = f"{grid.role} pool"
                        raise Unusable(f"--pool-routing {self.pool_routing}: {unknown_name(kind, name, known)}")

    def __str__(self) -> str:
        """Return the options as the user wrote them."""
        routing = [] if self.pool_routing is None else [f"--pool-routing {self.pool_routing}"]
        return " ".join(routing + ["--no-canaries"] * self.no_canaries)
