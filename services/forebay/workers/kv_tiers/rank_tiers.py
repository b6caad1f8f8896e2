"""STAND-IN, not committed."""

import threading, time
from collections import deque, Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
import numpy as np
from forebay.engine_model.steps import StoreChange, Stored, Removed
from forebay.kv_tiers.manager import TierManager, TierLimits, TierSet, TierRun
from forebay.kv_tiers.costs import CostModel
from forebay.workers.kv_tiers.stores import open_store


@dataclass
class LoadResult:
    blocks: int
    us: float
    by_tier: dict


class RankTiers:
    def __init__(self, settings, identity, *, wake):
        self.s, self.identity, self.wake = settings, identity, wake
        bb = identity.block_bytes
        L = lambda n: TierLimits(blocks=n, write=settings.write, filter=settings.filters)
        self.m = TierManager(
            TierSet(
                host=TierLimits(blocks=settings.host_bytes // bb, write=settings.write)
                if settings.host_bytes
                else None,
                disk=L(settings.disk_bytes // bb) if settings.disk else None,
                store=L(1 << 20) if settings.store else None,
            )
        )
        self.costs = CostModel()
        n = settings.host_bytes // bb
        self.host = np.empty((n, bb), dtype=np.uint8) if n else None
        self.free = list(range(n))
        self.slot = {}
        self.pool = ThreadPoolExecutor(4)
        self.done = deque()
        self.names = {}
        self.disk = self.store = None
        self.pending = 0
        self.counts = Counter()
        self.stale_blocks = []

    def open(self):
        if self.s.disk:
            self.disk = open_store(
                self.s.disk, self.identity, quota_bytes=self.s.disk_bytes, shared=False, io=self.s.io
            )
        if self.s.store:
            self.store = open_store(
                self.s.store,
                self.identity,
                quota_bytes=self.s.store_bytes,
                shared=True,
                io=self.s.io,
                endpoint=self.s.store_endpoint,
            )
        for tier, st in (("disk", self.disk), ("store", self.store)):
            if st:
                for page in st.inventory():
                    for n in page:
                        self.names[n.key] = n
                    self.m.add(tier, [n.key for n in page])

    def close(self):
        self.pool.shutdown()
        for st in (self.disk, self.store):
            if st:
                st.close()

    @property
    def store_name(self):
        return self.store.name if self.store else ""

    def _of(self, t):
        return self.disk if t == "disk" else self.store

    def _spawn(self, fn, then):
        self.pending += 1

        def run():
            try:
                r = fn()
            except Exception as e:
                r = e
            self.done.append((then, r))
            self.wake()

        self.pool.submit(run)

    def poll(self):
        while self.done:
            then, r = self.done.popleft()
            self.pending -= 1
            if isinstance(r, Exception):
                raise r
            then(r)

    def match(self, names, begin, cached_tokens, hinted=0):
        keys = [n.key for n in names]
        for n in names:
            self.names[n.key] = n
        if hinted and self.store:
            self.m.add("store", keys[begin:hinted])
        runs = self.m.match(keys, begin)
        n = self.costs.worthwhile(cached_tokens, runs, self.identity.block_size)
        out = []
        for r in runs:
            if n > 0:
                out.append(TierRun(r.tier, min(r.blocks, n)))
                n -= r.blocks
        return out

    def load(self, names, begin, runs, into, done):
        keys = [n.key for n in names]
        loads = self.m.load(keys, begin, runs)
        t0 = time.monotonic()
        state = {"left": len(loads), "ok": {}}
        if not loads:
            done(LoadResult(0, 0, {}))
            return 0
        at = 0
        for ld in loads:
            part = into[at : at + len(ld.keys)]
            first = at
            at += len(ld.keys)

            def ended(res, ld=ld, first=first):
                bad = [k for k, r in zip(ld.keys, res) if r]
                self.costs.observe_load(ld.tier, len(ld.keys), (time.monotonic() - t0) * 1e6)
                self.m.loaded(ld.number, bad)
                if ld.tier == "host":
                    pass
                for i, r in enumerate(res):
                    state["ok"][first + i] = (r == "", ld.tier)
                state["left"] -= 1
                if not state["left"]:
                    n = 0
                    by = Counter()
                    while n in state["ok"] and state["ok"][n][0]:
                        by[state["ok"][n][1]] += 1
                        n += 1
                    done(LoadResult(n, (time.monotonic() - t0) * 1e6, dict(by)))

            self._spawn(lambda ld=ld, part=part: self._read(ld.tier, ld.keys, part), ended)
        return 1

    def _read(self, tier, keys, into):
        if tier == "host":
            for k, v in zip(keys, into):
                v[:] = self.host[self.slot[k]].data
            return [""] * len(keys)
        return self._of(tier).read([self.names[k] for k in keys], into, 5.0)

    def offer(self, names, block, done=None):
        for n in names:
            self.names[n.key] = n
        self._writes(self.m.offer([n.key for n in names]), {n.key: i for i, n in enumerate(names)}, block)

    def device_evicts(self, names, block):
        for n in names:
            self.names[n.key] = n
        self._writes(self.m.device_evicts([n.key for n in names]), {n.key: i for i, n in enumerate(names)}, block)

    def prefetch(self, names, begin, hinted=0):
        for n in names:
            self.names[n.key] = n
        self._writes(self.m.prefetch([n.key for n in names], begin), {}, None)

    def _writes(self, writes, index, block):
        for w in writes:
            if w.tier == "host":
                for k in w.evicted:
                    self.free.append(self.slot.pop(k))
            elif w.evicted:
                self._of(w.tier).remove([self.names[k] for k in w.evicted])
            src = {}
            if w.source == "device":
                src = {k: np.array(block(index[k])) for k in w.keys}
            elif w.source == "host":
                src = {k: self.host[self.slot[k]] for k in w.keys}
            if w.tier == "host":
                slots = {k: self.free.pop() for k in w.keys}

                def fn(w=w, src=src, slots=slots):
                    bad = []
                    if w.source in ("disk", "store"):
                        res = self._of(w.source).read(
                            [self.names[k] for k in w.keys], [memoryview(self.host[slots[k]]) for k in w.keys], 5.0
                        )
                        bad = [k for k, r in zip(w.keys, res) if r]
                    else:
                        for k in w.keys:
                            self.host[slots[k]] = src[k]
                    return bad

                def then(bad, w=w, slots=slots):
                    for k, s in slots.items():
                        if k in bad:
                            self.free.append(s)
                        else:
                            self.slot[k] = s
                    if w.source in ("disk", "store"):
                        self.m.remove(w.source, bad)
                    self._writes(self.m.written(w.number, bad), {}, None)
            else:

                def fn(w=w, src=src):
                    if w.source == "disk":
                        buf = np.empty((len(w.keys), self.identity.block_bytes), np.uint8)
                        res = self.disk.read([self.names[k] for k in w.keys], [memoryview(r) for r in buf], 5.0)
                        src = {k: b for k, b, r in zip(w.keys, buf, res) if not r}
                    have = [k for k in w.keys if k in src]
                    res = self._of(w.tier).write([(self.names[k], memoryview(src[k])) for k in have], 30.0)
                    ok = {k for k, r in zip(have, res) if not r}
                    return [k for k in w.keys if k not in ok]

                def then(bad, w=w):
                    self._writes(self.m.written(w.number, bad), {}, None)

            self._spawn(fn, then)

    def resident(self, tier):
        return [self.names[k] for k in self.m.resident(tier)]

    def clear(self):
        for t in ("host", "disk"):
            keys = self.m.resident(t)
            self.m.remove(t, keys)
            if t == "host":
                for k in keys:
                    self.free.append(self.slot.pop(k))
            elif self.disk:
                self.disk.remove([self.names[k] for k in keys])

    def changes(self):
        cache, store = [], []
        for tier, stored, removed in self.m.changes():
            h = lambda ks: [self.names[k].sequence_hash for k in ks]
            if tier == "store":
                store.append(StoreChange(stored=h(stored), removed=h(removed)))
            elif stored:
                cache.append(Stored(None, h(stored), tier))
            else:
                cache.append(Removed(h(removed), tier))
        return cache, store
