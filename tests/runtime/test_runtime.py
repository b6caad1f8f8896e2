"""The current runtime reaches tasks, threads and tickers that are started in its context, and no others."""

import asyncio

from forebay import runtime
from tests.harness.fake_runtime import FakeRuntime

FAR_S = 1e9


def is_shifted() -> bool:
    return runtime.wall_s() > 3e9  # after the year 2065


async def test_tasks_and_threads_inherit_the_runtime() -> None:
    with runtime.use(FakeRuntime(2 * FAR_S)):
        task = asyncio.create_task(runtime.offload(is_shifted))
        threads = runtime.executor(1, "test")
        in_executor = asyncio.wrap_future(threads.submit(is_shifted))
    assert not is_shifted()
    assert await task
    assert await in_executor
    assert not await asyncio.wrap_future(threads.submit(is_shifted))
    threads.shutdown()


async def test_services_in_one_process_may_have_different_runtimes() -> None:
    async def read(shift_s: float) -> float:
        with runtime.use(FakeRuntime(shift_s)):
            await asyncio.sleep(0)
            return runtime.wall_s()

    ahead, now = await asyncio.gather(read(FAR_S), read(0.0))
    assert ahead - now > FAR_S / 2


async def test_a_ticker_steps_until_its_end_in_the_runtime_of_its_start() -> None:
    seen: list[bool] = []
    first = asyncio.Event()
    loop = asyncio.get_running_loop()

    def step() -> float | None:
        seen.append(is_shifted())
        loop.call_soon_threadsafe(first.set)
        return 3600.0 if len(seen) == 1 else None

    with runtime.use(FakeRuntime(2 * FAR_S)):
        ticker = runtime.start_ticker(step, "test")
    await first.wait()
    ticker.wake()
    await ticker.ended()
    assert seen == [True, True]
