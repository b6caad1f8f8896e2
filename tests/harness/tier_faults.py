"""Damage stored KV blocks while workers use them: files in directories, and objects in a bucket."""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from forebay.workers.kv_tiers.block_store import QUARANTINE
from tests.harness.s3 import FaultyS3

SUFFIX = ".kv"
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
