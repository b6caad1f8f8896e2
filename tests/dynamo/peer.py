"""Serve Dynamo's own router components over stdin and stdout.

Each input line is a JSON list `[call, arguments]`; each output line is its result. Runs under a Python with
ai-dynamo, never under forebay's.
"""

import asyncio
import inspect
import json
import os
import sys
from typing import Any

from dynamo.llm import RadixTree, SelectionService, compute_block_hash_for_seq  # type: ignore[import-not-found]

PATIENCE_S = 20.0


class Peer:
    def __init__(self) -> None:
        self._tree = RadixTree()
        self._service = SelectionService(indexer_threads=1)

    def hashes(self, *arguments: Any) -> Any:
        """Return block hashes. Arguments: tokens, block size, objects per block, adapter, tenant."""
        tokens, block_size, objects, lora_name, tenant = arguments
        return compute_block_hash_for_seq(tokens, block_size, objects, lora_name=lora_name, cache_namespace=tenant)

    def new_tree(self) -> None:
        """Replace the index with an empty one."""
        self._tree = RadixTree()

    def apply(self, worker: int, event: Any) -> None:
        self._tree.apply_event(worker, json.dumps(event).encode())

    def matches(self, blocks: list[int]) -> Any:
        """Return pairs of worker and match length in blocks."""
        return [[worker, depth] for (worker, _), depth in self._tree.find_matches(blocks).scores.items()]

    async def service(self, method: str, *arguments: Any) -> Any:
        answer = getattr(self._service, method)(*arguments)
        return await answer if inspect.isawaitable(answer) else answer

    def loads(self, model: str) -> Any:
        return self._service.loads(model_name=model)

    async def until_scheduled(self, model: str, workers: int) -> None:
        """Wait until the scheduler knows `workers` workers of a model, because registration is asynchronous."""
        async with asyncio.timeout(PATIENCE_S):
            while [len(one["loads"]) for one in self.loads(model)] != [workers]:  # noqa: ASYNC110 - it sets no event
                await asyncio.sleep(0.001)

    async def until_cached(self, body: dict[str, Any], worker: int, blocks: int) -> None:
        """Wait until the index contains the routed blocks, because the index is updated asynchronously."""
        async with asyncio.timeout(PATIENCE_S):
            while (worker, blocks) not in await self._cached(body):  # noqa: ASYNC110 - it sets no event
                await asyncio.sleep(0.001)

    async def _cached(self, body: dict[str, Any]) -> list[tuple[int, int]]:
        scores = (await self._service.overlap_scores(body))["workers"]
        return [(one["worker_id"], one["device_blocks"]) for one in scores]

    async def worker(self, body: dict[str, Any]) -> Any:
        """Add a worker, with a KV event endpoint on which no process listens."""
        return await self._service.upsert_worker({**body, "kv_events_endpoints": {0: "tcp://127.0.0.1:9"}})


async def main(answers: Any) -> None:
    peer = Peer()
    for line in sys.stdin:
        call, arguments = json.loads(line)
        answer = getattr(peer, call)(*arguments)
        if inspect.isawaitable(answer):
            answer = await answer
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # Keep stdout for results; Dynamo's own prints go elsewhere.
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(main(own))
