"""Store of KV blocks in an S3 bucket, which workers share.

Theory of operation. Blocks are moved by boto3, many at a time, each on a thread of its own. A transfer uses memory of
its own, so a caller can give it up at a deadline: boto3 cannot cancel it. Transfers that were abandoned are bounded,
because they keep their memory and thread until they end. Copying a block afterwards takes a hundredth of the time of a
fast network.

S3 does not record reads, so if the bucket exceeds its quota, the blocks that were written first are removed first.
"""

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from forebay import runtime
from forebay.runtime.errors import ConfigError, install_command
from forebay.workers.engine import EngineError, PackageMissing
from forebay.workers.kv_tiers.block_format import PAYLOAD_OFFSET
from forebay.workers.kv_tiers.block_store import (
    DESCRIPTION_BYTES_MAX,
    IDENTITY_NAME,
    BlockStore,
    StorageError,
    StoredFile,
    start_call,
)
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity

NAME = re.compile(r"(?!.*\.\.)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
CONNECT_S = 3.0
READ_S = 10.0  # without a byte of a response
TRIES = 2  # per request; the caller may compute instead of waiting
THREADS = 16  # concurrent requests; each waits for the network most of the time
DELETE_MAX = 1000  # objects per request, a limit of S3
POLL_S = 0.0005
KNOWN_MAX = 1_000_000  # keys of blocks that this process believes to be in the bucket, 100 MB

REASONS = {
    "missing": {"404", "NoSuchKey", "NotFound"},
    "denied": {
        "401", "403", "AccessDenied", "AllAccessDisabled", "CredentialRetrievalError", "ExpiredToken",
        "InvalidAccessKeyId", "NoCredentialsError", "PartialCredentialsError", "SignatureDoesNotMatch",
    },
    "full": {"507", "EntityTooLarge", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"},
    "exists": {"409", "412", "ConditionalRequestConflict", "PreconditionFailed"},
    "unsupported": {"501", "NotImplemented"},
}  # fmt: skip


def parsed_bucket(url: str) -> tuple[str, str]:
    """Return the name of a bucket, and its prefix, which is empty or ends with a slash. Raises ConfigError."""
    name, _, prefix = url.removeprefix("s3://").partition("/")
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{url}: invalid bucket name {name!r}; expected s3://BUCKET/PREFIX, where BUCKET has 3 to 63 characters of"
            " a-z, 0-9, . and -, begins and ends with a letter or a digit, and has no two dots in a row"
        )
    return name, f"{prefix.strip('/')}/" if prefix.strip("/") else ""


NO_OPTIONS: Mapping[str, str] = {}

T = TypeVar("T")


class Bucket:
    """Objects below a prefix of a bucket: a `Storage`.

    `prefix` is empty or ends with a slash. If `endpoint` is empty, the configuration of boto3 decides. Raises
    ConfigError if the name of the bucket is invalid, PackageMissing if boto3 is not installed.
    """

    def __init__(self, url: str, endpoint: str = "") -> None:
        try:
            import boto3  # noqa: PLC0415 - a third of a second, and an extra
            from botocore.config import Config  # noqa: PLC0415
            from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
        except ImportError as error:
            raise PackageMissing(f"a store in a bucket needs boto3 ({error}): {install_command('kv-tiers')}") from error
        self.place = url
        self.name, self.prefix = parsed_bucket(url)
        config = Config(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            retries={"total_max_attempts": TRIES, "mode": "standard"},
            max_pool_connections=THREADS,
            # Blocks have checksums of their own, and not every server knows those of newer SDKs.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"} if endpoint else None,
        )
        self._errors = (BotoCoreError, ClientError, OSError)  # OSError: a connection that breaks during a read
        try:
            self._client = boto3.session.Session().client("s3", endpoint_url=endpoint or None, config=config)
        except (*self._errors, ValueError) as error:
            raise EngineError(f"cannot use {url}: {error}") from error

    def get(self, path: str, limit: int = DESCRIPTION_BYTES_MAX) -> bytes:
        with self._explained("read", path):
            return bytes(self._client.get_object(**self._at(path))["Body"].read(limit))

    def put(self, path: str, content: bytes, options: Mapping[str, str] = NO_OPTIONS) -> None:
        """Write an object with further arguments of boto3's `put_object`. Raises StorageError."""
        with self._explained("write", path):
            self._client.put_object(**self._at(path), Body=content, **options)

    def create(self, path: str, content: bytes) -> None:
        try:
            self.put(path, content, {"IfNoneMatch": "*"})
        except StorageError as error:
            if error.reason == "unsupported":  # two processes that start at the same time may create different ones
                self.put(path, content)
            elif error.reason != "exists":
                raise

    def move(self, path: str, to: str) -> None:
        with self._explained("copy", path):
            self._client.copy_object(**self._at(to), CopySource=self._at(path))
        self.delete([path])

    def delete(self, paths: Sequence[str]) -> list[str]:
        for begin in range(0, len(paths), DELETE_MAX):
            objects = [{"Key": self.prefix + path} for path in paths[begin : begin + DELETE_MAX]]
            with self._explained("delete", paths[begin]):
                found = self._client.delete_objects(Bucket=self.name, Delete={"Objects": objects, "Quiet": True})
            for one in found.get("Errors", ()):
                code = one.get("Code", "")
                raise StorageError(f"cannot delete {one.get('Key')} from {self.name}: {code}", _reason(code))
        return list(paths)

    def identities(self) -> list[str]:
        listed = self._list("", Delimiter="/")
        names = (one["Prefix"][len(self.prefix) : -1] for page in listed for one in page.get("CommonPrefixes", ()))
        return sorted(filter(IDENTITY_NAME.fullmatch, names))

    def pages(self, folder: str = "") -> Iterator[list[StoredFile]]:
        for page in self._list(f"{folder}/" if folder else ""):
            found = [
                StoredFile(one["Key"][len(self.prefix) :], one["Size"], one["LastModified"].timestamp())
                for one in page.get("Contents", ())
            ]
            yield [file for file in found if file.path.count("/") == 2]

    def names(self, identity: str) -> Iterator[list[str]]:
        for page in self.pages(identity):
            yield [file.name for file in page]

    def counting(self) -> AbstractContextManager[bool]:
        """Return True always: two processes may remove more than needed."""
        return contextlib.nullcontext(True)

    def _list(self, prefix: str, **options: str) -> Iterator[Any]:
        """Yield the responses of a listing, at most 1,000 objects each."""
        paginator = self._client.get_paginator("list_objects_v2")
        pages = iter(paginator.paginate(Bucket=self.name, Prefix=self.prefix + prefix, **options))
        while True:
            with self._explained("list", prefix):
                page = next(pages, None)
            if page is None:
                return
            yield page

    def _at(self, path: str) -> dict[str, str]:
        return {"Bucket": self.name, "Key": self.prefix + path}

    @contextlib.contextmanager
    def _explained(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            response = getattr(error, "response", None) or {}
            code = str(response.get("Error", {}).get("Code", "")) or type(error).__name__
            where = f"s3://{self.name}/{self.prefix}{path}"
            raise StorageError(f"cannot {verb} {where}: {error}", _reason(code)) from error


class ObjectStore(BlockStore):
    """Store of KV blocks of one identity in a bucket. See `Bucket` for `url` and `endpoint`.

    Raises EngineError if the bucket cannot be used, PackageMissing if boto3 is not installed.
    """

    def __init__(self, url: str, identity: KvIdentity, *, quota_bytes: int, endpoint: str = "") -> None:
        bucket = Bucket(url, endpoint)
        super().__init__(bucket, identity, quota_bytes)
        self._bucket = bucket
        self._free = threading.Semaphore(THREADS)
        self._known: dict[bytes, None] = {}

    def inventory(self) -> Iterator[list[BlockName]]:
        for page in super().inventory():
            self._learn(page)
            yield page

    def close(self) -> None:
        """Do nothing. The threads of requests that were abandoned end by the timeouts of boto3."""

    def _read(self, names: Sequence[BlockName], into: Sequence[memoryview], end_s: float) -> list[str]:
        def begin(at: int) -> Callable[[], bytes]:
            return partial(self._bucket.get, self._path(names[at]), self._format.file_bytes)

        def finish(at: int, content: bytes) -> str:
            problem = self._format.problem(memoryview(content), names[at])
            if not problem:
                into[at][:] = memoryview(content)[PAYLOAD_OFFSET:]
            return problem

        results = self._transfer(len(names), begin, finish, end_s)
        missing = [name for name, reason in zip(names, results, strict=True) if reason == "missing"]
        self._forget([name for name in missing if name.key in self._known])
        return results

    def _write(self, blocks: Sequence[tuple[BlockName, memoryview]], end_s: float) -> tuple[list[str], list[BlockName]]:
        new = [place for place, (name, _) in enumerate(blocks) if name.key not in self._known]

        def begin(at: int) -> Callable[[], None]:
            name, block = blocks[new[at]]
            return partial(self._bucket.put, self._path(name), self._format.file(name, block))

        results = [""] * len(blocks)
        for place, reason in zip(new, self._transfer(len(new), begin, lambda *_: "", end_s), strict=True):
            results[place] = reason
        written = [blocks[place][0] for place in new if not results[place]]
        self._learn(written)
        return results, written

    def _transfer(
        self, count: int, begin: Callable[[int], Callable[[], T]], finish: Callable[[int, T], str], end_s: float
    ) -> list[str]:
        """Run `count` requests, each on a thread of its own. Return the reasons of failures.

        Args:
            begin: returns the request at an index, which does not use the memory of the caller.
            finish: takes the result of the request at an index, and returns why it is bad, or an empty text.
            end_s: no result is awaited after this time.
        """
        results = ["deadline"] * count
        waiting = deque(range(count))
        running: dict[int, Future[T]] = {}
        while (waiting or running) and runtime.monotonic_s() < end_s:
            while waiting and self._free.acquire(blocking=False):
                place = waiting.popleft()
                running[place] = start_call(begin(place), "kv-bucket")
                running[place].add_done_callback(lambda _: self._free.release())
            ended = [place for place, future in running.items() if future.done()]
            for place in ended:
                results[place] = self._result(running.pop(place), partial(finish, place))
            if not ended:
                time.sleep(POLL_S)
        return results

    def _result(self, future: Future[T], finish: Callable[[T], str]) -> str:
        if (error := future.exception()) is None:
            return finish(future.result())
        reason = error.reason if isinstance(error, StorageError) else "failed"
        if reason != "missing":
            self._warn("%s", error)
        return reason

    def _learn(self, names: Iterable[BlockName]) -> None:
        with self._lock:
            self._known.update((name.key, None) for name in names)
            while len(self._known) > KNOWN_MAX:
                del self._known[next(iter(self._known))]

    def _forget(self, names: Sequence[BlockName]) -> None:
        super()._forget(names)
        with self._lock:
            for name in names:
                self._known.pop(name.key, None)


def _reason(code: str) -> str:
    return next((reason for reason, codes in REASONS.items() if code in codes), "failed")
