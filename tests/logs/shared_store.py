"""Recording of a shared store: several writers, stale blocks, measured costs, and a store that outlives its workers."""

from forebay.events.base import pack_u64
from forebay.events.fleet import WorkerLost
from forebay.events.kv import StoreBlocksAdded, StoreBlocksRemoved
from forebay.events.metrics import TierCost, TierCosts, TierCostsMeasured
from forebay.events.topics import KV_EVENTS, METRICS
from tests.logs.playing import scenario
from tests.logs.stage import Stage, hashes, prompt

STORE = "store-1"


@scenario
async def shared_store() -> Stage:
    stage = await Stage(tier_credit="measured", shared_cache_hit_weight=0.25).begin("w0", "w1", kv_store=STORE)
    await stage.join("w2", kv_store="store-2")
    await stage.join("w3")
    await stage.serve(("first", prompt(1, 6)), ("second", prompt(2, 6)))
    chain = hashes(prompt(1, 6))
    for writer, blocks in (("w0", chain[:4]), ("w1", chain[2:]), ("w2", hashes(prompt(3, 6)))):
        store = "store-2" if writer == "w2" else STORE
        stage.put(KV_EVENTS, StoreBlocksAdded(store=store, worker_id=writer, sequence_hashes=pack_u64(blocks)))
    await stage.settle()
    await stage.serve(("third", prompt(1, 6)), ("fourth", prompt(3, 6)))
    for name, fixed_us in (("w0", 4_000.0), ("w1", 500.0)):
        costs = TierCosts(prefill_block_us=900.0, tiers=(TierCost(tier="store", fixed_us=fixed_us, block_us=40.0),))
        epoch = stage.workers[name].epoch
        stage.put(METRICS, TierCostsMeasured(worker_id=name, worker_epoch=epoch, costs=costs))
    await stage.settle()
    await stage.serve(("fifth", prompt(1, 6, 1)), ("sixth", prompt(1, 6, 2)))
    stale = StoreBlocksRemoved(store=STORE, worker_id="w1", sequence_hashes=pack_u64(chain[5:]), stale=True)
    stage.put(KV_EVENTS, stale)
    for name in ("w0", "w1"):
        await stage.fact(WorkerLost, name)
    await stage.join("w4", kv_store=STORE)
    await stage.serve(("seventh", prompt(1, 6)), ("eighth", prompt(3, 6)))
    return stage
