"""KV tiers of one rank of a mock engine: offloads blocks of real bytes, and loads them before a prompt is computed.

Theory of operation. Blocks are offered to the tiers when the batch is published in which device memory has got them, so
a tier never has a block before the modelled engine does. A load goes to memory of its own, because the modelled device
has no bytes. Its blocks are checked, and the output tokens of the request depend on the result: they are wrong if a tier
served a wrong byte. Loads run in real time while the engine computes other requests.

`RankTiers` decides and moves. This module names blocks, makes their bytes, and remembers what each request has loaded.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING

from forebay.engine_model.requests import EngineConfig
from forebay.engine_model.steps import CacheChange, Load, Removed, StoreChange, Stored
from forebay.engine_model.timing import StepWork
from forebay.events.base import U32_BYTES, array_u64
from forebay.events.metrics import TierCost, TierCosts
from forebay.events.progress import OnboardedTokens
from forebay.events.work import WorkItem
from forebay.workers.engines.mock.block_contents import BlockContents, KnownBlock, KvCheck
from forebay.workers.kv_tiers.identity import BlockName, KeyChain, KvIdentity, media_by_block
