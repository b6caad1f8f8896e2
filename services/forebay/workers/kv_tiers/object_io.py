"""Move objects between a bucket and memory, by boto3 or by NIXL's OBJ plugin. Both work on many objects at a time.

Theory of operation. A transfer uses memory of the mover, so a caller can give a transfer up at a deadline: neither
boto3 nor NIXL can cancel it. Transfers that were abandoned are bounded, because they keep their memory or thread until
they end. Copying a block afterwards takes a hundredth of the time of a fast network. NIXL reports neither why a
transfer failed, nor that an object was shorter than expected, so callers repeat failed reads by boto3.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from forebay.workers.kv_tiers.block_file import HEAD_BYTES
from forebay.workers.kv_tiers.daemon_calls import start_call
from forebay.workers.kv_tiers.file_io import address
from forebay.workers.kv_tiers.s3_bucket import TRIES, Bucket, BucketError, Credentials
from forebay.workers.kv_transfer.nixl_agent import load_nixl

LOG = logging.getLogger(__name__)

THREADS = 16  # concurrent requests; each waits for the network most of the time
SLOT_BYTES = 128 << 20  # memory of the transfers by NIXL
SLOTS_MAX = 64
NAP_S = 0.0005

# Agents with transfers in flight when they were closed. Releasing them would wait for these transfers.
_left: list[object] = []


class ObjectTransfer(NamedTuple):
    """A transfer of one object.

    Attributes:
        state: what the mover needs.
    """

    key: str
    state: Any


class ObjectIo(Protocol):
    """Moves objects. Thread-safe."""

    def start_read(self, key: str) -> ObjectTransfer | None:
        """Begin to read an object. Return None while too many transfers are in flight."""
        ...

    def start_write(self, key: str, fill: Callable[[memoryview], None]) -> ObjectTransfer | None:
        """Begin to write an object. Return None while too many transfers are in flight.

        Args:
            fill: writes the content into the given memory, before this method returns.
        """
        ...

    def result(self, transfer: ObjectTransfer) -> memoryview | BucketError | None:
        """Return the content of the object, or why the transfer failed; None while it is in flight."""
        ...

    def end(self, transfer: ObjectTransfer) -> None:
        """Release the memory of a transfer. One in flight is abandoned."""
        ...

    def close(self) -> None: ...


class PlainObjects:
    """Moves objects by boto3, one thread per transfer.

    Args:
        size: bytes per object.
    """

    def __init__(self, bucket: Bucket, size: int) -> None:
        self._bucket = bucket
        self._size = size
        self._free = threading.Semaphore(THREADS)

    def start_read(self, key: str) -> ObjectTransfer | None:
        """See `ObjectIo.start_read`."""
        if not self._free.acquire(blocking=False):
            return None
        return self._submit(key, lambda: memoryview(self._bucket.get(key, self._size)))

    def start_write(self, key: str, fill: Callable[[memoryview], None]) -> ObjectTransfer | None:
        """See `ObjectIo.start_write`."""
        if not self._free.acquire(blocking=False):
            return None
        content = memoryview(bytearray(self._size))
        fill(content)

        def put() -> memoryview:
            self._bucket.put(key, content)
            return content

        return self._submit(key, put)

    def result(self, transfer: ObjectTransfer) -> memoryview | BucketError | None:
        """See `ObjectIo.result`."""
        future: Future[memoryview] = transfer.state
        if not future.done():
            return None
        error = future.exception()
        if error is None:
            return future.result()
        return error if isinstance(error, BucketError) else BucketError(repr(error), "failed")

    def end(self, transfer: ObjectTransfer) -> None:
        """See `ObjectIo.end`. The thread of a transfer in flight ends by the timeouts of boto3."""

    def close(self) -> None:
        """Release all resources: there are none except the threads of transfers in flight."""

    def _submit(self, key: str, act: Callable[[], memoryview]) -> ObjectTransfer:
        future = start_call(act, "kv-bucket")
        future.add_done_callback(lambda _: self._free.release())
        return ObjectTransfer(key, future)


class _Slot:
    """Memory of one transfer by NIXL, and the handles of the transfer."""

    def __init__(self, number: int, memory: memoryview) -> None:
        self.number = number
        self.memory = memory
        self.handle: Any = None
        self.object: Any = None


class NixlObjects:
    """Moves objects by NIXL's OBJ plugin.

    Args:
        size: bytes per object.

    Raises:
        PackageMissing: NIXL is not installed.
        BucketError: there are no credentials.
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

    def start_read(self, key: str) -> ObjectTransfer | None:
        """See `ObjectIo.start_read`."""
        return self._start("READ", key, None)

    def start_write(self, key: str, fill: Callable[[memoryview], None]) -> ObjectTransfer | None:
        """See `ObjectIo.start_write`."""
        return self._start("WRITE", key, fill)

    def result(self, transfer: ObjectTransfer) -> memoryview | BucketError | None:
        """See `ObjectIo.result`."""
        slot: _Slot = transfer.state
        with self._lock:
            done = self._is_done(slot)
        return None if done is None else slot.memory if done else BucketError("NIXL does not tell why", "failed")

    def end(self, transfer: ObjectTransfer) -> None:
        """See `ObjectIo.end`."""
        slot: _Slot = transfer.state
        with self._lock:
            if self._is_done(slot) is None:
                self._abandoned.append(slot)
            else:
                self._release(slot)

    def close(self) -> None:
        """Release the agent, unless a transfer that was abandoned is still in flight."""
        with self._lock:
            self._reap()
            if len(self._free) < len(self._slots):
                _left.append((self._agent, self._slots, self._memory))
            self._agent = None

    def _start(self, operation: str, key: str, fill: Callable[[memoryview], None] | None) -> ObjectTransfer | None:
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
                self._post(operation, key, slot)
            except Exception as error:
                self._release(slot)
                LOG.info("NIXL failed to %s an object: %s", operation.lower(), error)
                raise BucketError(f"NIXL failed to {operation.lower()} {key}: {error}", "failed") from error
        return ObjectTransfer(key, slot)

    def _post(self, operation: str, key: str, slot: _Slot) -> None:
        agent = self._agent
        slot.object = agent.register_memory([(0, self._size, slot.number, self._bucket.prefix + key)], mem_type="OBJ")
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
        if slot.handle is not None:
            self._agent.release_xfer_handle(slot.handle)
        if slot.object is not None:
            self._agent.deregister_memory(slot.object)
        slot.handle = slot.object = None
        self._free.append(slot)

    def _reap(self) -> None:
        """Release the transfers that were abandoned and have ended since."""
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


def nap() -> None:
    """Sleep for a moment between two polls."""
    time.sleep(NAP_S)
