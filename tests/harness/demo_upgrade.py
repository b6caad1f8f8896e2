"""`make demo-upgrade`: a rolling upgrade to another version under load, and back, without losing a request or a prefix.

Starts Kafka, Redis, two ingresses, two routers and four mock workers of this tree. The other version is a copy of this
tree with another `CORE_VERSION`, a changed cost rule and a new journal event (`tests.harness.other_version`). While
clients send requests, the demo replaces both routers, one worker and one ingress with processes of the other version,
and later replaces these with processes of this tree. At the end each version verifies its own part of the journal.
Exits 1 unless every request was answered once with the right tokens, all warm prefixes were kept, and all decisions
were verified.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from forebay.core.world import CORE_VERSION
from forebay.events.decisions import CostTerms, RequestRouted
from forebay.events.progress import RequestFinished
from forebay.events.topics import DECISIONS, PROGRESS
from tests.harness.cluster import FOREBAY, Cluster, Ownership
from tests.harness.demos import Demo, Place
from tests.harness.failover import Counts, System, stop_worker
from tests.harness.other_version import BATCH_MEASURED, COST_NOTED, OTHER_VERSION, build
from tests.harness.processes import ProcessError
from tests.integration.stream_clients import StreamClients, StreamResult, prompt

SPEEDUP = "0.1"  # of the mock engines: about 57 ms per token, so that streams last longer than a hand-off
WARM, WARM_BLOCKS = 40, 16
WARM_TOKENS = 2
FIRST_WARM = 1_000_000  # number of the first warm prompt; the load uses lower ones
LONG_TOKENS = 120
STREAMS = 40
ASK_EVERY_S = 0.04
AFTER_REQUESTS = 25  # requests routed after a hand-off before the next step
TAKEN_S, DRAIN_S, COMMAND_S = 60.0, 60.0, 60.0
READ_US = 1_000_000  # a worker has read the announcement of a new owner after this time
OTHER_WORKER = "w4-1"  # the only worker of the other version
KEPT_WORKERS = ("w1", "w2", "w3")  # these run all the time; the cache of a replaced worker ends with its process
DEMO = Demo("demo-upgrade", __doc__)


@dataclass(slots=True)
class HandOff:
    """A planned stop of an owner.

    Attributes:
        gap_s: longest time between two consecutive routings since the stop, in seconds.
        seal: offset of the `sealed` record that the first claim after `before` names, or -1.
    """

    before: Ownership
    after: Ownership
    gap_s: float
    seal: int

    def line(self) -> str:
        old, new = (f"{one.router} (rules {one.rules})" for one in (self.before, self.after))
        return f"{old} to {new}: no routing for {self.gap_s:.2f} s"


@dataclass(slots=True)
class Result:
    """The result of the demo.

    Attributes:
        counts: requests, as their clients saw them.
        hand_offs: planned stops of owners.
        kept: number of warm prefixes that were found, after the upgrade and after the rollback.
        verified: verified and recorded decisions, by version of the rules.
        noted: number of journal records with the new tag.
        measured: number of events with the new tag that workers wrote under owners of the other version.
        early: number of these events under owners of this tree, which do not know the tag.
        unmeasured: number of requests that the worker of the other version finished under owners of this tree.
        changed: number of decisions of the other version that select another candidate than the rule of this tree.
        routed: number of requests that the other version routed.
        in_flight: a line for each replaced worker and ingress, with its responses in flight.
    """

    counts: Counts = field(default_factory=Counts)
    hand_offs: list[HandOff] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    verified: dict[int, tuple[int, int]] = field(default_factory=dict)
    noted: int = 0
    measured: int = 0
    early: int = 0
    unmeasured: int = 0
    changed: int = 0
    routed: int = 0
    in_flight: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Add every unmet bar to `problems`."""
        self.problems += self.counts.problems
        rules = [one.after.rules for one in self.hand_offs]
        if OTHER_VERSION not in rules or not rules or rules[-1] != CORE_VERSION:
            self.problems.append(f"ownership went to the rules {rules}, expected {OTHER_VERSION} and back")
        self.problems += [f"a claim names no seal: {one.line()}" for one in self.hand_offs if one.seal < 0]
        if self.kept != [WARM, WARM]:
            self.problems.append(f"warm prefixes kept: {self.kept}, expected {WARM} after each replacement")
        for version in (CORE_VERSION, OTHER_VERSION):
            verified, decisions = self.verified.get(version, (0, 0))
            if verified != decisions or not decisions:
                self.problems.append(f"version {version} verified {verified} of its {decisions} decisions")
        if not self.noted:
            self.problems.append(f"no owner wrote {COST_NOTED}")
        if not self.measured or self.early or not self.unmeasured:
            self.problems.append(
                f"the worker wrote {self.measured} {BATCH_MEASURED} for owners that know the tag, and {self.early} for"
                f" others, which let it run {self.unmeasured} requests"
            )
        if not self.changed:
            self.problems.append("the changed cost rule changed no decision")

    def line(self) -> str:
        counts = self.counts
        verified = ", ".join(f"version {rules}: {one} of {all_}" for rules, (one, all_) in self.verified.items())
        kept = ", ".join(f"{one} of {WARM}" for one in self.kept)
        verdict = f"FAILED ({len(self.problems)} problems)" if self.problems else "ok"
        lines = [
            "results",
            *(f"hand-off from {one.line()}" for one in self.hand_offs),
            *self.in_flight,
            f"requests: {counts.sent}, lost, repeated, hung or wrong {len(counts.problems)},"
            f" rejected with 503 and sent again {counts.rejected}",
            f"warm prefixes kept after the upgrade and after the rollback: {kept}",
            f"decisions of the other version: {self.changed} of {self.routed} select another worker than the rule of"
            f" this tree; {self.noted} records {COST_NOTED}",
            f"records {BATCH_MEASURED} of the other version's worker: {self.measured} for owners that know the tag,"
            f" {self.early} for others, for which it finished {self.unmeasured} requests",
            f"decisions verified by their own version: {verified}",
            *(f"problem: {one}" for one in self.problems[:10]),
        ]
        return "\n  ".join([*lines, verdict])


class Rollout:
    """Replaces processes of one version with those of the other one, while clients send requests."""

    def __init__(self, system: System, clients: StreamClients, result: Result) -> None:
        self._system = system
        self._cluster = system.cluster
        self._clients = clients
        self._result = result

    async def routers(self, old: list[str], new: list[str], program: str) -> None:
        """Start the routers `new`, then stop the routers `old` one by one, the owner first. Raises ProcessError."""
        for name in new:
            self._cluster.router(name, program=program)
        await self._system.until_followed(new, await self._system.journal_end())
        while old:
            owner = await self._cluster.owner()
            name = owner if owner in old else old[0]
            old.remove(name)
            if name == owner:
                await self._hand_off(name)
            else:
                await self._cluster.stop(name)

    async def worker(self, old: str, new: str, program: str) -> None:
        """Start the worker `new`, then stop `old`, which finishes its requests in flight. Raises ProcessError."""
        members = len(await self._cluster.members())
        self._cluster.worker(new, "--speedup", SPEEDUP, "--drain-s", f"{DRAIN_S:g}", program=program)
        await self._cluster.until_members(count=members + 1)
        await self._until_more_routed(AFTER_REQUESTS)
        in_flight = sum(not one.ends and not one.problem for one in self._clients.results)
        exit_s = await stop_worker(self._cluster, old)
        self._result.in_flight.append(
            f"worker {old} replaced by {new} with {in_flight} responses in flight in the system; loss recorded"
            f" {exit_s:+.2f} s after its exit"
        )
        DEMO.report(self._result.in_flight[-1])

    async def ingress(self, old: str, new: str, program: str) -> None:
        """Start the ingress `new`, send no more requests to `old`, and stop `old`. Raises ProcessError."""
        self._cluster.ingress(new, program=program)
        await self._cluster.until_serving(len(await self._cluster.members()))
        urls = dict(self._cluster.urls)
        gone = urls.pop(old)
        in_flight = sum(one.url == gone and not one.ends for one in self._clients.results)
        self._clients.urls[:] = list(urls.values())
        await self._cluster.stop(old, within_s=DRAIN_S)
        self._result.in_flight.append(f"ingress {old} replaced by {new} with {in_flight} of its responses in flight")
        DEMO.report(self._result.in_flight[-1])

    async def _hand_off(self, owner: str) -> None:
        stopped_us = time.time_ns() // 1000
        await self._cluster.stop(owner)
        after = await self._cluster.taken_over(owner, within_s=TAKEN_S)
        await self._until_more_routed(AFTER_REQUESTS)
        ownerships = await self._cluster.ownerships()
        self._result.hand_offs.append(hand_off_in(ownerships, owner, after, stopped_us))
        DEMO.report(f"hand-off from {self._result.hand_offs[-1].line()}")

    async def _until_more_routed(self, count: int) -> None:
        least = await self._cluster.routed() + count
        await self._cluster.until("requests are routed", self._cluster.routed, lambda routed: routed >= least)


def hand_off_in(ownerships: list[Ownership], stopped: str, after: Ownership, since_us: int) -> HandOff:
    """Return the hand-off from a stopped router to `after`.

    On a busy machine two routers may claim one after the other. Only the first of these claims follows the seal.
    """
    at = max(number for number, one in enumerate(ownerships) if one.router == stopped)
    return HandOff(ownerships[at], after, longest_gap_s(ownerships, since_us), ownerships[at + 1].seal)


def longest_gap_s(ownerships: list[Ownership], since_us: int) -> float:
    """Return the longest time between two consecutive routings, of which the later one is after `since_us`."""
    times = sorted(at for one in ownerships for at in one.routed_us)
    return max((after - before) / 1e6 for before, after in pairwise(times) if after > since_us)


async def ask_warm(system: System, holders: list[set[str]], counts: Counts) -> list[StreamResult]:
    """Send the warm prompts one after the other, and return their responses in the order of `holders`."""
    found: dict[int, StreamResult] = {}
    async with system.clients() as clients:
        for number in by_turns(holders):
            (found[number],) = await clients.answers([prompt(FIRST_WARM + number, WARM_BLOCKS)], WARM_TOKENS)
        system.count(clients, WARM_TOKENS, counts)
    return [found[number] for number in range(WARM)]


def by_turns(holders: list[set[str]]) -> list[int]:
    """Return the numbers of the prompts in an order in which the holders take turns.

    A client gets its response slightly before the owner reads that the request has finished. If the next prompt had the
    same holder, its load could make another worker cheaper.
    """
    seen: Counter[str] = Counter()
    places = []
    for number, held in enumerate(holders):
        first = min(held, default="")
        places.append((seen[first], first, number))
        seen[first] += 1
    return [number for _, _, number in sorted(places)]


def kept(holders: list[set[str]], responses: list[StreamResult]) -> int:
    """Return how many prompts went to a worker that holds them. Add each worker to the holders of its prompt."""
    count = 0
    for held, one in zip(holders, responses, strict=True):
        if one.served:
            count += one.worker in held and one.cached_tokens > 0
            held.add(one.worker)
    return count


def old_cost(terms: CostTerms) -> float:
    """Return the cost of a candidate by the rule of this tree, with the default weights."""
    return max(terms.prefill_blocks - terms.overlap_credit, 0.0) + terms.decode_blocks


def selects_other(decided: RequestRouted) -> bool:
    """Return whether the runner-up of a decision is cheaper than its selected candidate by the rule of this tree."""
    runner_up = decided.runner_up
    return runner_up is not None and old_cost(runner_up.terms) < old_cost(decided.terms)


async def prove(cluster: Cluster, other: str, result: Result) -> None:
    """Verify the journal with both versions, and look for decisions that the changed rule changed."""
    covered, end = 0, await cluster.log.end(DECISIONS.name, cluster.partition())
    for version, program in ((CORE_VERSION, FOREBAY), (OTHER_VERSION, other)):
        found = await cluster.verify(program=program)
        result.verified[version] = found["verified"], found["decisions"]
        if found["divergence"] is not None or found["unverified"]:
            result.problems.append(f"version {version}: {found['divergence']}, not verified {found['unverified']}")
        others = {span["rules"] for span in found["others"]}
        if others != {CORE_VERSION, OTHER_VERSION} - {version}:
            result.problems.append(f"version {version} names the other versions {others}")
        covered += end - sum(span["end"] - span["first"] for span in found["others"])
    if covered != end:
        result.problems.append(f"the versions verified {covered} records, the journal has {end}")
    epochs = {one.epoch for one in await cluster.ownerships() if one.rules == OTHER_VERSION}
    decided = [one for one in await cluster.events(DECISIONS, RequestRouted) if one.owner_epoch in epochs]
    result.routed, result.changed = len(decided), sum(map(selects_other, decided))
    result.noted = len(await cluster.unknown(DECISIONS, COST_NOTED))
    await count_measured(cluster, result)
    result.problems += [f"{name} printed a traceback" for name in cluster.processes.tracebacks()]


async def count_measured(cluster: Cluster, result: Result) -> None:
    """Count the events with the worker's new tag, and the requests of this worker while no owner knew the tag."""
    owners = await cluster.ownerships()
    ends_us = [*(one.claimed_us for one in owners[1:]), time.time_ns()]
    known = [
        (one.claimed_us, end + READ_US) for one, end in zip(owners, ends_us, strict=True) if one.rules == OTHER_VERSION
    ]

    def is_known(at_us: int) -> bool:
        return any(begin <= at_us < end for begin, end in known)

    written = await cluster.unknown(PROGRESS, BATCH_MEASURED)
    result.measured = sum(map(is_known, written))
    result.early = len(written) - result.measured
    finished = await cluster.events(PROGRESS, RequestFinished)
    result.unmeasured = sum(one.worker_id == OTHER_WORKER and not is_known(one.at_us) for one in finished)


async def check_program(cluster: Cluster, other: str) -> None:
    """Check that the command of the other version imports the other version. Raises ProcessError."""
    _, out = await cluster.command("version", "--version", within_s=COMMAND_S, program=other)
    if not out.strip().endswith(f"decision rules {OTHER_VERSION}"):
        raise ProcessError(f"the other version is {out.strip()}, expected decision rules {OTHER_VERSION}")
    DEMO.report(f"this tree has decision rules {CORE_VERSION}, the other version is {out.strip()}")


async def replace(system: System, result: Result, generation: int, names: dict[str, list[str]], program: str) -> None:
    """Replace the processes `names` under load with processes of `program`, and update `names`."""
    new = {kind: [f"{name[:2]}-{generation}" for name in old] for kind, old in names.items()}
    async with system.load(ASK_EVERY_S, result.counts) as clients, system.clients() as long:
        rollout = Rollout(system, clients, result)
        for number in range(STREAMS):
            long.submit(prompt(2 * FIRST_WARM + generation * STREAMS + number), LONG_TOKENS)
        # The worker of the other version also runs under owners of this one, before the upgrade and after the way back.
        if program != FOREBAY:
            await rollout.worker(names["workers"][0], new["workers"][0], program)
        await rollout.routers(list(names["routers"]), new["routers"], program)
        if program == FOREBAY:
            await rollout.worker(names["workers"][0], new["workers"][0], program)
        await rollout.ingress(names["ingresses"][0], new["ingresses"][0], program)
        await long.all()
        await system.until_served(clients, AFTER_REQUESTS, len(clients.results))
        system.count(long, LONG_TOKENS, result.counts)
    names.update(new)


async def run(place: Place, _options: argparse.Namespace) -> Result:
    result = Result()
    other = await asyncio.to_thread(build, place.folder / "other")
    async with place.cluster() as cluster:
        await check_program(cluster, other)
        names = {"routers": ["r1", "r2"], "workers": ["w4"], "ingresses": ["i2"]}
        await cluster.serve(names["routers"], KEPT_WORKERS, ("i1", "i2"), worker=("--speedup", SPEEDUP))
        system = System(cluster)
        holders: list[set[str]] = [set() for _ in range(WARM)]
        kept(holders, await ask_warm(system, holders, result.counts))
        cluster.worker("w4", "--speedup", SPEEDUP)
        await cluster.until_members(count=len(KEPT_WORKERS) + 1)
        DEMO.report(f"{WARM} prefixes are warm")
        for generation, program in enumerate((other, FOREBAY), start=1):
            await replace(system, result, generation, names, program)
            result.kept.append(kept(holders, await ask_warm(system, holders, result.counts)))
            DEMO.report(f"{result.kept[-1]} of {WARM} warm prefixes kept")
        result.problems += await system.settled()
        await prove(cluster, other, result)
    result.judge()
    return result


def main() -> int:
    return DEMO.run(run)


if __name__ == "__main__":
    sys.exit(main())
