"""Store of KV blocks in an S3 bucket, which workers share.

Theory of operation. Blocks are moved by NIXL's OBJ plugin or by boto3, many at a time. A transfer uses memory of its
own, so a caller can give a transfer up at a deadline: neither boto3 nor NIXL can cancel it. Transfers that were
abandoned are bounded, because they keep their memory or thread until they end. Copying a block afterwards takes a
hundredth of the time of a fast network. NIXL reports neither why a transfer failed, nor that an object was shorter than
expected, so boto3 repeats what fails. Requests that move no blocks always use boto3.

S3 does not record reads, so if the bucket exceeds its quota, the blocks that were written first are removed first.
"""

import contextlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from forebay import runtime
from forebay.workers.engine import EngineError, PackageMissing
from forebay.workers.kv_tiers.block_format import HEAD_BYTES, PAYLOAD_OFFSET
from forebay.workers.kv_tiers.block_store import (
    DESCRIPTION_BYTES_MAX,
    IDENTITY_NAME,
    BlockStore,
    StorageError,
    StoredFile,
    start_call,
)
from forebay.workers.kv_tiers.disk import address
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity
from forebay.workers.kv_tiers.settings import IoKind
from forebay.workers.kv_transfer.nixl_agent import load_nixl

LOG = logging.getLogger(__name__)

URL = re.compile(r"s3://([A-Za-z0-9][A-Za-z0-9.\-]{1,61}[A-Za-z0-9])(?:/(.*))?")
CONNECT_S = 3.0
READ_S = 10.0  # without a byte of a response
TRIES = 2  # per request; the caller may compute instead of waiting
THREADS = 16  # concurrent requests; each waits for the network most of the time
DELETE_MAX = 1000  # objects per request, a limit of S3
SLOT_BYTES = 128 << 20  # memory of the transfers by NIXL
SLOTS_MAX = 64
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
NO_OPTIONS: Mapping[str, str] = {}

# Agents with transfers in flight when they were closed. Releasing them would wait for these transfers.
_left: list[object] = []


class Credentials(NamedTuple):
    """Credentials of requests, in the order of NIXL's parameters `access_key`, `secret_key` and `session_token`."""

    access_key: str
    secret_key: str
    session_token: str


class Bucket:
    """Objects below a prefix of a bucket: a `Storage`.

    `prefix` is empty or ends with a slash. If `endpoint` is empty, the configuration of boto3 decides. Raises
    EngineError if the URL is not `s3://BUCKET` or `s3://BUCKET/PREFIX`, PackageMissing if boto3 is not installed.
    """

    def __init__(self, url: str, endpoint: str = "") -> None:
        try:
            import boto3  # noqa: PLC0415 - a third of a second, and an extra
            from botocore.config import Config  # noqa: PLC0415
            from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
        except ImportError as error:
            raise PackageMissing(
                f"a store in a bucket requires the package boto3 ({error}); install it with: pip install"
                " 'forebay[kv-tiers]'"
            ) from error
        found = URL.fullmatch(url)
        if found is None:
            raise EngineError(f"{url}: not a bucket; expected s3://BUCKET or s3://BUCKET/PREFIX")
        self.place = url
        self.name = found[1]
        prefix = (found[2] or "").strip("/")
        self.prefix = f"{prefix}/" if prefix else ""
        self._session = boto3.session.Session()
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
            self._client = self._session.client("s3", endpoint_url=endpoint or None, config=config)
        except (*self._errors, ValueError) as error:
            raise EngineError(f"cannot use {url}: {error}") from error
        self.endpoint = str(self._client.meta.endpoint_url)
        self.region = str(self._client.meta.region_name)
        self.is_custom = bool(endpoint) or "amazonaws.com" not in self.endpoint

    def credentials(self) -> Credentials:
        """Return the current credentials. Raises StorageError if there are none."""
        with self._explained("find credentials for", ""):
            found = self._session.get_credentials()
        if found is None:
            raise StorageError(
                f"there are no credentials for {self.place}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"
                " configure a profile",
                "denied",
            )
        frozen = found.get_frozen_credentials()
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")

    def get(self, path: str, limit: int = DESCRIPTION_BYTES_MAX) -> bytes:
        with self._explained("read", path):
            return bytes(self._client.get_object(**self._at(path))["Body"].read(limit))

    def put(self, path: str, content: bytes | memoryview, options: Mapping[str, str] = NO_OPTIONS) -> None:
        """Write an object with further arguments of boto3's `put_object`. Raises StorageError."""
        with self._explained("write", path):
            self._client.put_object(**self._at(path), Body=bytes(content), **options)

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


class Boto3Transfers:
    """Moves objects of `size` bytes by boto3, one thread per transfer. Thread-safe."""

    def __init__(self, bucket: Bucket, size: int) -> None:
        self._bucket = bucket
        self._size = size
        self._free = threading.Semaphore(THREADS)

    def start(self, path: str, fill: Callable[[memoryview], None] | None) -> Future[memoryview] | None:
        """Begin a transfer. Return None while too many transfers are in flight.

        `fill` writes the content of a new object, before this method returns. If it is None, the object is read.
        """
        if not self._free.acquire(blocking=False):
            return None
        content = memoryview(bytearray(self._size))
        if fill is not None:
            fill(content)

        def move() -> memoryview:
            if fill is None:
                return memoryview(self._bucket.get(path, self._size))
            self._bucket.put(path, content)
            return content

        future = start_call(move, "kv-bucket")
        future.add_done_callback(lambda _: self._free.release())
        return future

    def result(self, transfer: Future[memoryview]) -> memoryview | StorageError | None:
        """Return the content of the object, or why the transfer failed; None while it is in flight."""
        if not transfer.done():
            return None
        error = transfer.exception()
        if error is None:
            return transfer.result()
        return error if isinstance(error, StorageError) else StorageError(repr(error), "failed")

    def end(self, transfer: Future[memoryview]) -> None:
        """Release the memory of a transfer. One in flight is abandoned; its thread ends by the timeouts of boto3."""


class _Slot:
    def __init__(self, number: int, memory: memoryview) -> None:
        self.number = number
        self.memory = memory
        self.handle: Any = None
        self.object: Any = None


class NixlTransfers:
    """Moves objects of `size` bytes by NIXL's OBJ plugin, with the interface of `Boto3Transfers`.

    Raises StorageError if there are no credentials.
    """

    def __init__(self, bucket: Bucket, size: int) -> None:
        import numpy  # noqa: PLC0415 - an extra

        self._nixl = load_nixl("KV tiers")
        self._bucket = bucket
        self._size = size
        count = max(1, min(SLOTS_MAX, SLOT_BYTES // size))
        self._memory = memoryview(numpy.zeros(count * size, dtype=numpy.uint8))  # type: ignore[arg-type]
        self._slots = [_Slot(number, self._memory[number * size : (number + 1) * size]) for number in range(count)]
        self._free = list(self._slots)
        self._abandoned: list[_Slot] = []
        self._lock = threading.Lock()  # an agent must be used by one thread at a time
        self._credentials = bucket.credentials()
        self._agent = self._new_agent(self._credentials)

    def start(self, path: str, fill: Callable[[memoryview], None] | None) -> _Slot | None:
        with self._lock:
            self._reap()
            if not self._free:
                return None
            slot = self._free.pop()
        if fill is not None:
            fill(slot.memory)
        else:
            # NIXL does not report that an object is too short. The end of an earlier one must not complete it.
            slot.memory[:HEAD_BYTES] = bytes(HEAD_BYTES)
            slot.memory[-1:] = b"\0"
        with self._lock:
            try:
                self._renew_credentials()
                self._post("READ" if fill is None else "WRITE", path, slot)
            except Exception as error:  # noqa: BLE001 - NIXL's own classes; the slot counts as failed
                LOG.info("NIXL failed to start a transfer: %s", error)
                self._clear(slot)
        return slot

    def result(self, transfer: _Slot) -> memoryview | StorageError | None:
        with self._lock:
            done = self._is_done(transfer)
        if done is None:
            return None
        return transfer.memory if done else StorageError("NIXL does not tell why", "failed")

    def end(self, transfer: _Slot) -> None:
        with self._lock:
            if self._is_done(transfer) is None:
                self._abandoned.append(transfer)
            else:
                self._release(transfer)

    def close(self) -> None:
        """Release the agent, unless a transfer that was abandoned is still in flight."""
        with self._lock:
            self._reap()
            if len(self._free) < len(self._slots):
                _left.append((self._agent, self._slots, self._memory))
            self._agent = None

    def _post(self, operation: str, path: str, slot: _Slot) -> None:
        agent = self._agent
        slot.object = agent.register_memory([(0, self._size, slot.number, self._bucket.prefix + path)], mem_type="OBJ")
        slot.handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs([(address(slot.memory), self._size, 0)], mem_type="DRAM"),
            agent.get_xfer_descs([(0, self._size, slot.number)], mem_type="OBJ"),
            agent.name,
            b"",
        )
        agent.transfer(slot.handle)

    def _is_done(self, slot: _Slot) -> bool | None:
        """Return whether a transfer has succeeded; None while it is in flight."""
        if slot.handle is None:
            return False
        try:
            state = self._agent.check_xfer_state(slot.handle)
        except Exception as error:  # noqa: BLE001 - NIXL's own classes
            LOG.info("a transfer by NIXL failed: %s", error)
            return False
        return None if state == "PROC" else state == "DONE"

    def _release(self, slot: _Slot) -> None:
        self._clear(slot)
        self._free.append(slot)

    def _clear(self, slot: _Slot) -> None:
        if slot.handle is not None:
            self._agent.release_xfer_handle(slot.handle)
        if slot.object is not None:
            self._agent.deregister_memory(slot.object)
        slot.handle = slot.object = None

    def _reap(self) -> None:
        """Release the abandoned transfers that have ended."""
        ended = [slot for slot in self._abandoned if self._is_done(slot) is not None]
        for slot in ended:
            self._abandoned.remove(slot)
            self._release(slot)

    def _renew_credentials(self) -> None:
        """Create a new agent if the credentials have changed, because temporary ones expire."""
        found = self._bucket.credentials()
        if found != self._credentials and len(self._free) == len(self._slots) - 1:
            self._agent = self._new_agent(found)
            self._credentials = found

    def _new_agent(self, credentials: Credentials) -> Any:
        bucket = self._bucket
        options = {
            "bucket": bucket.name,
            "scheme": "http" if bucket.endpoint.startswith("http:") else "https",
            "region": bucket.region,
            "use_virtual_addressing": "false",
            # Blocks have checksums of their own, and not every server knows those of newer SDKs.
            "req_checksum": "required",
            "resp_checksum": "required",
            "num_threads": str(THREADS),
            **{key: value for key, value in credentials._asdict().items() if value},
        }
        if bucket.is_custom:
            options["endpoint_override"] = bucket.endpoint
        config = self._nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        agent = self._nixl.nixl_agent("forebay-bucket", config)
        with _variables(AWS_RETRY_MODE="standard", AWS_MAX_ATTEMPTS=str(TRIES)):
            agent.create_backend("OBJ", options)
        agent.register_memory([(address(self._memory), len(self._memory), 0, "")], mem_type="DRAM")
        return agent


class ObjectStore(BlockStore):
    """Store of KV blocks of one identity in a bucket. See `Bucket` for `url` and `endpoint`.

    Raises EngineError if the bucket cannot be used, PackageMissing if boto3 or NIXL is not installed.
    """

    def __init__(self, url: str, identity: KvIdentity, *, quota_bytes: int, io: IoKind, endpoint: str = "") -> None:
        bucket = Bucket(url, endpoint)
        super().__init__(bucket, identity, quota_bytes)
        try:
            self._nixl = NixlTransfers(bucket, self._format.file_bytes) if io == "nixl" else None
        except StorageError as error:
            raise EngineError(f"cannot use {url} for KV blocks: {error}") from error
        self._boto3 = Boto3Transfers(bucket, self._format.file_bytes)
        self._known: dict[bytes, None] = {}

    def inventory(self) -> Iterator[list[BlockName]]:
        for page in super().inventory():
            self._learn(page)
            yield page

    def close(self) -> None:
        """Release the agent of NIXL, without waiting for requests that were abandoned."""
        if self._nixl is not None:
            self._nixl.close()

    def _read(self, names: Sequence[BlockName], into: Sequence[memoryview], end_s: float) -> list[str]:
        def take(place: int, content: memoryview) -> str:
            problem = self._format.problem(content, names[place])
            if not problem:
                into[place][:] = content[PAYLOAD_OFFSET : self._format.file_bytes]
            return problem

        results = self._move(names, None, take, end_s)
        missing = [name for name, reason in zip(names, results, strict=True) if reason == "missing"]
        self._forget([name for name in missing if name.key in self._known])
        return results

    def _write(self, blocks: Sequence[tuple[BlockName, memoryview]], end_s: float) -> tuple[list[str], list[BlockName]]:
        new = [(place, name) for place, (name, _) in enumerate(blocks) if name.key not in self._known]
        names = [name for _, name in new]

        def fill(at: int, memory: memoryview) -> None:
            self._format.fill(memory, names[at], blocks[new[at][0]][1])

        results = [""] * len(blocks)
        for (place, _), reason in zip(new, self._move(names, fill, lambda *_: "", end_s), strict=True):
            results[place] = reason
        written = [name for place, name in new if not results[place]]
        self._learn(written)
        return results, written

    def _move(
        self,
        names: Sequence[BlockName],
        fill: Callable[[int, memoryview], None] | None,
        finish: Callable[[int, memoryview], str],
        end_s: float,
    ) -> list[str]:
        """Transfer objects, and repeat by boto3 what fails by NIXL. Return the reasons of failures.

        Args:
            fill: writes the content of the object at an index into memory; None to read objects.
            finish: takes the content of the object at an index, and returns why it is bad, or an empty text.
            end_s: no result is awaited after this time.
        """
        results = ["deadline"] * len(names)
        if self._nixl is not None:
            self._transfer(self._nixl, names, range(len(names)), fill, finish, end_s, results)
        failed = [place for place, reason in enumerate(results) if reason]
        for place in failed:
            results[place] = "deadline"
        self._transfer(self._boto3, names, failed, fill, finish, end_s, results)
        return results

    def _transfer(
        self,
        transfers: "Boto3Transfers | NixlTransfers",
        names: Sequence[BlockName],
        places: Iterable[int],
        fill: Callable[[int, memoryview], None] | None,
        finish: Callable[[int, memoryview], str],
        end_s: float,
        results: list[str],
    ) -> None:
        waiting = deque(places)
        running: dict[int, Any] = {}
        try:
            while (waiting or running) and runtime.monotonic_s() < end_s:
                while waiting:
                    place = waiting[0]
                    transfer = transfers.start(self._path(names[place]), fill and partial(fill, place))
                    if transfer is None:
                        break
                    running[waiting.popleft()] = transfer
                ended = {place: transfers.result(transfer) for place, transfer in running.items()}
                ended = {place: found for place, found in ended.items() if found is not None}
                for place, found in ended.items():
                    if isinstance(found, StorageError):
                        results[place] = found.reason
                        if transfers is self._boto3 and found.reason != "missing":
                            self._warn("%s", found)
                    elif found is not None:
                        results[place] = finish(place, found)
                    transfers.end(running.pop(place))
                if not ended:
                    time.sleep(POLL_S)
        finally:
            for transfer in running.values():
                transfers.end(transfer)

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


@contextlib.contextmanager
def _variables(**wanted: str) -> Iterator[None]:
    """Set environment variables that are not set. The AWS SDK of NIXL has no other way to limit its retries."""
    new = {name: text for name, text in wanted.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]
