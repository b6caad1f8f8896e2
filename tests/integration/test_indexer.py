"""Two indexers share the groups, and prove their state while owners and indexers die."""

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.events.decisions import Advanced, Sealed
from forebay.events.topics import DECISIONS
from infra.kafka.kafka import HOST
from tests.harness.cluster import FOREBAY, GROUP, Cluster
from tests.harness.local import free_ports
from tests.integration.conftest import MakeCluster
from tests.integration.stream_clients import BLOCK, prompt

SHORT = 6
REQUESTS = 6
FAUST = Path(sys.executable).with_name("faust")
SNAPSHOTS = ("--snapshot-every", "5")


class Indexers:
    """The indexers of a cluster by name."""

    def __init__(self, cluster: Cluster, client: httpx.Client) -> None:
        self._cluster = cluster
        self._client = client
        self._first_port = free_ports(2)

    def url(self, name: str) -> str:
        return f"http://{HOST}:{self._first_port + int(name[-1])}"

    def start(self, name: str) -> None:
        port = self.url(name).rpartition(":")[2]
        self._cluster.processes.start(name, [FOREBAY, "indexer", *self._cluster.where, "--port", port])

    def start_by_faust(self, name: str) -> None:
        """Start an indexer by Faust's own command line."""
        port, settings = self.url(name).rpartition(":")[2], self._cluster.settings
        variables = {"KAFKA": settings.bootstrap, "NAMESPACE": settings.namespace, "PORT": port}
        environment = [f"FOREBAY_{key}={value}" for key, value in variables.items()]
        app = ("-A", "forebay.cli.processes.faust_indexer", "worker", "-l", "warn")
        self._cluster.processes.start(name, ["/usr/bin/env", *environment, str(FAUST), *app])

    def get(self, name: str, path: str) -> httpx.Response | None:
        try:
            return self._client.get(f"{self.url(name)}{path}")
        except httpx.TransportError:
            return None

    def group(self, name: str) -> dict[str, Any]:
        """Return the entry of the group as this indexer reports it, empty while it does not respond."""
        found = self.get(name, "/groups")
        entries = [] if found is None else found.raise_for_status().json()["groups"]
        return next((one for one in entries if one["model"] == GROUP), {})

    async def holder(self, *names: str) -> str:
        """Wait until one of these indexers follows the group and the others name its address. Return its name."""

        def found() -> str | None:
            entries = {name: self.group(name) for name in names}
            holders = [name for name in names if entries[name].get("state") == "following"]
            if len(holders) != 1:
                return None
            others = {entries[name].get("address") for name in names if name not in holders}
            return holders[0] if others <= {self.url(holders[0])} else None

        return str(await self._cluster.until("one indexer follows the group", found))

    async def proven(self, name: str) -> None:
        """Wait until this indexer has proven its state at the newest digest of the journal."""

        async def is_proven() -> bool:
            newest = max(
                offset
                for offset, event in enumerate(await self._cluster.events(DECISIONS))
                if isinstance(event, Advanced | Sealed)
            )
            position = self.group(name).get("position")
            return position is not None and position["proven_at"] is not None and position["proven_at"] >= newest

        await self._cluster.until(f"{name} has proven its state", is_proven)

    def overlaps(self, name: str, token_ids: list[int]) -> list[dict[str, Any]]:
        found = self._client.post(f"{self.url(name)}/groups/{GROUP}/overlaps", json={"token_ids": token_ids})
        ranks: list[dict[str, Any]] = found.raise_for_status().json()["ranks"]
        return ranks

    def counts(self, name: str) -> tuple[float, float]:
        """Return how many digests were equal, and how many differed, in this process."""
        found = self.get(name, "/metrics")
        assert found is not None
        kinds = ("digests_equal", "digest_differences")
        totals = [re.search(rf"forebay_indexer_{kind}_total{{.*}} (\S+)", found.text) for kind in kinds]
        equal, different = (0.0 if one is None else float(one[1]) for one in totals)
        return equal, different


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=20) as opened:
        yield opened


@pytest.mark.timeout(400)
async def test_two_indexers_prove_their_state_while_owners_and_indexers_die(
    make_cluster: MakeCluster, client: httpx.Client
) -> None:
    async with make_cluster("indexer") as cluster:
        await cluster.serve(("r1", "r2"), ("w1", "w2"), ("i1",), router=SNAPSHOTS)
        indexers = Indexers(cluster, client)
        for name in ("x0", "x1"):
            indexers.start(name)
        holder = await indexers.holder("x0", "x1")
        number = 0

        async def load() -> None:
            nonlocal number
            async with httpx.AsyncClient(timeout=60) as clients:
                for _ in range(REQUESTS):
                    body = {"model": GROUP, "prompt": prompt(number % 3), "max_tokens": SHORT}
                    response = await clients.post(f"{cluster.urls['i1']}/v1/completions", json=body)
                    assert response.status_code == httpx.codes.OK, response.text
                    number += 1

        await load()
        await indexers.proven(holder)
        other = {"x0": "x1", "x1": "x0"}[holder]
        assert (indexers.get(other, f"/groups/{GROUP}/load") or httpx.Response(0)).status_code == 421
        owner = await cluster.owner()
        cluster.kill(owner)
        await load()
        await indexers.proven(holder)
        assert indexers.counts(holder)[0] >= 2
        cluster.kill(holder)  # the other one restores the newest snapshot
        await load()
        await cluster.until("the other indexer has the group", functools.partial(indexers.group, other), is_following)
        await indexers.proven(other)
        indexers.start_by_faust(holder)
        cluster.router(owner, *SNAPSHOTS)
        now = await indexers.holder("x0", "x1")
        await load()
        await indexers.proven(now)
        for name in ("x0", "x1"):
            assert indexers.counts(name)[1] == 0
            assert (indexers.get(name, "/ready") or httpx.Response(0)).status_code == 200
        assert max(rank["device"] for rank in indexers.overlaps(now, prompt(0))) == len(prompt(0)) // BLOCK
        await cluster.stop(other)
        await cluster.require_verified()


def is_following(entry: dict[str, Any]) -> bool:
    return entry.get("state") == "following"
