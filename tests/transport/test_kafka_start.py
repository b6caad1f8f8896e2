"""`start_whole` returns a started client or stops the client, also on cancellation and errors."""

import asyncio

import pytest

from forebay.transport.kafka.start import start_whole, stop_within


class Client:
    """A client that connects once allowed, and counts its calls."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.starting = asyncio.Event()
        self.let_in = asyncio.Event()

    async def start(self) -> None:
        self.notes.append("starts")
        self.starting.set()
        try:
            await self.let_in.wait()
        except asyncio.CancelledError:
            self.notes.append("is cancelled")
            raise
        self.notes.append("is connected")

    async def stop(self) -> None:
        self.notes.append("is stopped")


async def cancelled_midway(client: Client) -> asyncio.Task[None]:
    starting = asyncio.create_task(start_whole(client.start, client.stop))
    await client.starting.wait()
    starting.cancel()
    return starting


async def test_a_started_client_is_not_stopped() -> None:
    client = Client()
    client.let_in.set()
    await start_whole(client.start, client.stop)
    assert client.notes == ["starts", "is connected"]


async def test_a_cancelled_start_completes_before_the_client_is_stopped() -> None:
    client = Client()
    starting = await cancelled_midway(client)
    client.let_in.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert client.notes == ["starts", "is connected", "is stopped"]


async def test_a_hanging_start_does_not_block_its_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.transport.kafka.start.CANCEL_GRACE_S", 0.01)
    client = Client()
    starting = await cancelled_midway(client)
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert client.notes == ["starts", "is cancelled", "is stopped"]


async def test_a_failing_start_raises_its_error_and_stops_the_client() -> None:
    client = Client()

    async def refused() -> None:
        raise OSError("connection refused")

    with pytest.raises(OSError, match="connection refused"):
        await start_whole(refused, client.stop)
    assert client.notes == ["is stopped"]


async def test_clients_are_stopped_whatever_their_stop_raises() -> None:
    stopped: list[str] = []

    async def cancelled() -> None:
        raise asyncio.CancelledError  # aiokafka awaits tasks that it has cancelled

    async def failed() -> None:
        raise RuntimeError("a task failed before")

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("cancelled")

    async def ends() -> None:
        stopped.append("ended")

    await stop_within(0.01, cancelled(), failed(), hangs(), ends())
    assert stopped == ["ended", "cancelled"]
