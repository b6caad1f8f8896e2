"""Mock workers with KV tiers in a cluster, conversations that reuse KV, and stores that fail meanwhile.

Every turn of a conversation repeats the earlier turns and their answers, so its KV can come from any tier. The expected
answers follow from the prompts alone, so each answer is checked as soon as it arrives.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from forebay.events.kv import StoreBlocksRemoved
from forebay.events.progress import FirstTokenEmitted, PrefillFinished
from forebay.events.topics import KV_EVENTS, PROGRESS
from forebay.workers.kv_tiers.block_store import QUARANTINE
from tests.harness.cluster import Cluster
from tests.harness.mock_words import Words
from tests.harness.s3 import FaultyS3
from tests.integration.stream_clients import StreamClients, StreamResult, problems

BLOCK = 16  # tokens per block
ANSWER = 16  # tokens per answer
TURN = 40  # new tokens of each turn
PREFIX = 128  # tokens that the conversations of one topic share
TOPICS = 4
TOKEN_IDS = 1_000
CONCURRENT = 12  # conversations at a time
# Loads must be faster than computing, or the workers compute: 16 ms per block is slower than an S3 server in Python.
PROFILE = 'kind = "linear"\ncosts_us = { step = 500, prefill_token = 1000, decode_step = 4000 }\n'
SIZES = ("--block-size", str(BLOCK), "--kv-blocks", "64", "--kv-bytes-per-token", "1024", "--lease-ttl-s", "3")
HOST = ("--kv-tier", "host:size=2MB")
DAMAGE_EVERY_S = 0.2
SUFFIX = ".kv"  # of block files and objects
SAMPLE_MAX = 4_096  # file names that one search reads, because a directory may have many more


class BlockDamage:
    """Truncates, flips and deletes random blocks.

    Args:
        bucket: server with objects; None for none.
    """

    def __init__(self, seed: int, folders: Sequence[Path], bucket: FaultyS3 | None = None) -> None:
        self._rng = random.Random(seed)
        self._folders = folders
        self._bucket = bucket
        self.done: Counter[str] = Counter()

    def damage(self) -> None:
        """Damage one random file of each directory, and one random object. What no longer exists is skipped."""
        for folder in self._folders:
            files = [file for file, _ in zip(folder.rglob(f"*{SUFFIX}"), range(SAMPLE_MAX), strict=False)]
            files = [file for file in files if QUARANTINE not in file.parts]
            if files:
                kind, change = self._kind()
                with contextlib.suppress(FileNotFoundError):  # the worker evicted the block
                    file = self._rng.choice(files)
                    changed = change(file.read_bytes())
                    if changed is None:
                        file.unlink()
                    else:
                        file.write_bytes(changed)
                    self.done[f"{kind} file"] += 1
        if self._bucket is not None and self._bucket.state == "serves":
            with contextlib.suppress(BotoCoreError, ClientError):  # the same, or the server stops
                self._damage_object(self._bucket)

    def _damage_object(self, bucket: FaultyS3) -> None:
        keys = [key for key in bucket.keys(SUFFIX) if QUARANTINE not in key]
        if not keys:
            return
        kind, change = self._kind()
        key, client = self._rng.choice(keys), bucket.client
        changed = change(client.get_object(Bucket=bucket.bucket, Key=key)["Body"].read())
        if changed is None:
            client.delete_object(Bucket=bucket.bucket, Key=key)
        else:
            client.put_object(Bucket=bucket.bucket, Key=key, Body=changed)
        self.done[f"{kind} object"] += 1

    def _kind(self) -> tuple[str, Callable[[bytes], bytes | None]]:
        kinds: list[tuple[str, Callable[[bytes], bytes | None]]] = [
            ("truncated", self._truncated),
            ("flipped", self._flipped),
            ("deleted", lambda _: None),
        ]
        return self._rng.choice(kinds)

    def _truncated(self, content: bytes) -> bytes:
        return content[: self._rng.randrange(len(content))] if content else content

    def _flipped(self, content: bytes) -> bytes:
        if not content:
            return content
        at = self._rng.randrange(len(content))
        return content[:at] + bytes([content[at] ^ (1 << self._rng.randrange(8))]) + content[at + 1 :]


@dataclass(slots=True)
class Conversation:
    """A conversation: its tokens so far, and its answers.

    Attributes:
        prompt: prompt of the next turn, with the earlier turns and answers.
    """

    number: int
    prompt: list[int]
    turns: int = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens and the new tokens of the next turn."""
        self.turns += 1
        begin = self.number * 7_919 + self.turns * 104_729
        self.prompt = [*self.prompt, *tokens, *((begin + at * 31) % TOKEN_IDS for at in range(TURN))]


@dataclass(slots=True)
class Reuse:
    """KV that requests reused, from the log.

    Attributes:
        tokens: prompt tokens by the tier from which they were loaded.
        own: prompt tokens from all tiers that only this conversation has. A new worker has them from its shared store,
            also if it has copied them to host memory before it loaded them.
    """

    tokens: Counter[str] = field(default_factory=Counter)
    own: int = 0

    def line(self) -> str:
        return ", ".join(f"{self.tokens[tier]:,} from {tier}" for tier in ("host", "disk", "store"))


class TierSystem:
    """Mock workers with tiers in a cluster.

    Args:
        folder: folder for disks, the shared directory and the engine profile.

    Attributes:
        wrong: a line for each answer that is not the expected one.
    """

    def __init__(self, cluster: Cluster, clients: StreamClients, folder: Path, bucket: FaultyS3) -> None:
        self.cluster = cluster
        self.clients = clients
        self.bucket = bucket
        self.folder = folder
        self.shared = folder / "shared"
        self.damage = BlockDamage(2026, [folder / "disks", self.shared], bucket)
        self.wrong: list[str] = []
        self.exact = 0
        self._words = Words()
        self._profile = folder / "engine.toml"
        self._profile.write_text(PROFILE)
        self._conversations: dict[int, Conversation] = {}
        self._served: dict[int, set[str]] = {}  # workers by conversation

    def worker(self, name: str, *options: str, bucket: bool = False, host: bool = True) -> None:
        """Start a worker with a disk of its own and the shared directory or the bucket, by default with host memory."""
        store = f"s3://{self.bucket.bucket}/kv,endpoint={self.bucket.url}" if bucket else str(self.shared)
        disk = f"disk:path={self.folder / 'disks' / name},size=100MB,filter=off"
        self.cluster.worker(
            name,
            *("--engine-profile", str(self._profile), *SIZES, *(HOST if host else ())),
            *("--kv-tier", disk, "--kv-tier", f"store:path={store}", *options),
        )

    async def restart(self, name: str, *options: str, bucket: bool = False) -> None:
        """Kill a worker with SIGKILL, and start it again with the same disk."""
        before = (await self.cluster.members())[name].worker_epoch
        self.cluster.kill(name)
        self.worker(name, *options, bucket=bucket)
        await self.cluster.until(
            f"{name} joined again",
            self.cluster.members,
            lambda members: name in members and members[name].worker_epoch > before,
        )

    async def converse(self, numbers: Sequence[int], turns: int) -> list[StreamResult]:
        """Let conversations continue for some turns each, a few conversations at a time."""
        results: list[StreamResult] = []
        places = asyncio.Semaphore(CONCURRENT)

        async def one(number: int) -> None:
            async with places:
                results.extend([await self._turn(self._conversation(number)) for _ in range(turns)])

        async with asyncio.TaskGroup() as tasks:
            for number in numbers:
                tasks.create_task(one(number))
        return results

    @contextlib.asynccontextmanager
    async def damaging(self) -> AsyncIterator[None]:
        """Damage blocks of all directories and of the bucket while the body runs."""

        async def damage() -> None:
            while True:
                await asyncio.to_thread(self.damage.damage)
                await asyncio.sleep(DAMAGE_EVERY_S)

        task = asyncio.create_task(damage())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def reuse(self, results: Sequence[StreamResult]) -> Reuse:
        """Return the KV that these requests have loaded from tiers."""
        ids = {one.request_id for one in results}
        found = Reuse()
        for event in await self.cluster.events(PROGRESS, FirstTokenEmitted | PrefillFinished):
            if event.request_id in ids:
                for part in event.onboarded:
                    found.tokens[part.tier] += part.tokens
                found.own += max(0, sum(part.tokens for part in event.onboarded) - PREFIX)
        return found

    async def stale(self) -> int:
        """Return the number of blocks that workers expected in a shared store and could not use."""
        events = await self.cluster.events(KV_EVENTS, StoreBlocksRemoved)
        return sum(len(one.sequence_hashes) // 8 for one in events if one.stale)

    def served_by(self, *names: str) -> list[int]:
        """Return the numbers of the conversations of which one of these workers has served a turn."""
        return sorted(number for number, workers in self._served.items() if workers & {*names})

    def _conversation(self, number: int) -> Conversation:
        if number not in self._conversations:
            topic = number % TOPICS
            prefix = [(topic * 211 + at * 17) % TOKEN_IDS for at in range(PREFIX)]
            self._conversations[number] = Conversation(number, prefix)
            self._conversations[number].add(())
        return self._conversations[number]

    async def _turn(self, conversation: Conversation) -> StreamResult:
        prompt = conversation.prompt
        result = await self.clients.answer(prompt, ANSWER)
        expected = self._words.text(prompt, ANSWER)
        faults = problems([result], ANSWER)
        if faults or result.text != expected:
            self.wrong += faults or [f"{result.request_id}: {result.text!r}, expected {expected!r}"]
        else:
            self.exact += 1
            self._served.setdefault(conversation.number, set()).add(result.worker)
        conversation.add(self._words.tokens(prompt, ANSWER))
        return result
