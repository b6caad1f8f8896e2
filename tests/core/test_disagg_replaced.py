"""A model whose pools for whole requests are replaced by prefill and decode pools, or the other way round."""

from forebay.events.control import PoolConfigured
from forebay.events.fleet import WorkerDraining
from tests.core.worlds import BLOCK, PROMPTS, Driver, joined, request


def test_disagg_the_pool_with_a_ready_worker_serves() -> None:
    drive = Driver().fleet("a")  # in the pool default
    drive("control", PoolConfigured(pool="apart", model="m", block_size=BLOCK, role="decode"))
    (routed,) = drive("requests", request("first", PROMPTS[0]))
    assert routed.pool == "default"
    drive("fleet", WorkerDraining(owner_epoch=0, worker_id="a", worker_epoch=drive.epoch("a")))
    (refused,) = drive("requests", request("second", PROMPTS[0]))
    assert refused.reason == "no_workers"
    drive("fleet", joined("d", 0, pool="apart", role="decode"))
    (routed,) = drive("requests", request("third", PROMPTS[0]))
    assert (routed.pool, routed.worker_id) == ("apart", "d")
