"""The indexers of a cluster, as their HTTP API and metrics show them."""

import re
import sys
from pathlib import Path
from typing import Any

import httpx

from forebay.events.decisions import Advanced, Sealed
from forebay.events.topics import DECISIONS
from infra.kafka.kafka import HOST
from tests.harness.cluster import FOREBAY, GROUP, Cluster
from tests.harness.local import free_ports

FAUST = Path(sys.executable).with_name("faust")
DIGEST = Advanced | Sealed
INDEXERS = ("x0", "x1")


class Indexers:
    """Two indexers by name."""

    def __init__(self, cluster: Cluster, client: httpx.Client) -> None:
        self._cluster = cluster
        self._client = client
        first = free_ports(len(INDEXERS))
        self._ports = {name: str(first + number) for number, name in enumerate(INDEXERS)}

    def url(self, name: str) -> str:
        return f"http://{HOST}:{self._ports[name]}"

    def start(self, name: str) -> None:
        command = [FOREBAY, "indexer", *self._cluster.where, "--port", self._ports[name]]
        self._cluster.processes.start(name, command)

    def start_by_faust(self, name: str) -> None:
        """Start an indexer by Faust's own command line."""
        settings = self._cluster.settings
        variables = {"KAFKA": settings.bootstrap, "NAMESPACE": settings.namespace, "PORT": self._ports[name]}
        environment = [f"FOREBAY_{key}={value}" for key, value in variables.items()]
        app = ("-A", "forebay.cli.processes.faust_indexer", "worker", "-l", "warn")
        self._cluster.processes.start(name, ["/usr/bin/env", *environment, str(FAUST), *app])

    def get(self, name: str, path: str) -> httpx.Response | None:
        try:
            return self._client.get(f"{self.url(name)}{path}")
        except httpx.TransportError:
            return None

    def group(self, name: str, group: str = GROUP) -> dict[str, Any]:
        """Return the entry of the group as this indexer reports it, empty while it does not respond."""
        found = self.get(name, "/groups")
        entries = [] if found is None else found.raise_for_status().json()["groups"]
        return next((one for one in entries if one["model"] == group), {})

    async def holder(self, group: str = GROUP) -> str:
        """Wait until one of the indexers follows the group and the other names its address. Return its name."""

        def found() -> str | None:
            entries = {name: self.group(name, group) for name in INDEXERS}
            holders = [name for name in INDEXERS if entries[name].get("state") == "following"]
            if len(holders) != 1:
                return None
            others = {entries[name].get("address") for name in INDEXERS if name not in holders}
            return holders[0] if others <= {self.url(holders[0])} else None

        return str(await self._cluster.until(f"one indexer follows {group}", found))

    async def proven(self, name: str, group: str = GROUP) -> None:
        """Wait until this indexer has read the whole journal, and has proven its state at the newest digest."""

        async def is_proven() -> bool:
            position = self.group(name, group).get("position") or {}
            end = await self._cluster.log.end(DECISIONS.name, self._cluster.partition(group))
            if position.get("journal_offset") != end:
                return False
            events = enumerate(await self._cluster.events(DECISIONS, group=group))
            newest = max(offset for offset, event in events if isinstance(event, DIGEST))
            return position["proven_at"] is not None and position["proven_at"] >= newest

        await self._cluster.until(f"{name} has proven its state of {group}", is_proven)

    def overlaps(self, name: str, token_ids: list[int]) -> list[dict[str, Any]]:
        found = self._client.post(f"{self.url(name)}/groups/{GROUP}/overlaps", json={"token_ids": token_ids})
        ranks: list[dict[str, Any]] = found.raise_for_status().json()["ranks"]
        return ranks

    def counts(self, name: str) -> tuple[int, int]:
        """Return how many digests were equal, and how many differed, in this process; zeros if it does not respond."""
        found = self.get(name, "/metrics")
        text = "" if found is None else found.text
        kinds = ("digests_equal", "digest_differences")
        totals = [re.findall(rf"forebay_indexer_{kind}_total{{.*}} (\S+)", text) for kind in kinds]
        equal, different = (int(sum(float(one) for one in total)) for total in totals)
        return equal, different
