"""`start_whole`: a client is started, or stopped again, whatever happens meanwhile."""

import asyncio

import pytest

from forebay.transport.kafka.start import start_whole


class Client:
    """Connects once it is let in; notes what is done to it."""

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


async def test_a_client_that_starts_is_left_alone() -> None:
    client = Client()
    client.let_in.set()
    await start_whole(client.start, client.stop)
    assert client.notes == ["starts", "is connected"]


async def test_a_start_that_is_cancelled_ends_by_itself_before_the_client_is_stopped() -> None:
    client = Client()
    starting = await cancelled_midway(client)
    client.let_in.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert client.notes == ["starts", "is connected", "is stopped"]


async def test_a_start_that_hangs_does_not_hold_up_its_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.transport.kafka.start.CANCEL_GRACE_S", 0.01)
    client = Client()
    starting = await cancelled_midway(client)
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert client.notes == ["starts", "is cancelled", "is stopped"]


async def test_a_start_that_fails_raises_its_error_and_the_client_is_stopped() -> None:
    client = Client()

    async def refused() -> None:
        raise OSError("nobody is there")

    with pytest.raises(OSError, match="nobody is there"):
        await start_whole(refused, client.stop)
    assert client.notes == ["is stopped"]
