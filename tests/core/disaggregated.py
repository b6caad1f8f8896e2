"""Steps of a disaggregated request."""

from typing import Any

from forebay.events.base import pack_u64
from forebay.events.control import (
    DisaggConfig,
)
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import WorkerLost
from forebay.events.kv import BlocksStored
from forebay.events.progress import PrefillFinished
from tests.core.worlds import (
    PROMPTS,
    Driver,
    prefilled_by,
    request,
)


def progress_fields(routed: RequestRouted) -> dict[str, Any]:
    names = ("request_id", "attempt", "worker_id", "worker_epoch", "owner_epoch")
    return {name: getattr(routed, name) for name in names}


def prefilled(drive: Driver, routed: RequestRouted, **changes: Any) -> list[Any]:
    kept = prefilled_by(routed.worker_id, routed.worker_epoch, **changes)
    return drive("progress", PrefillFinished(**progress_fields(routed), prefilled=kept))


def ask(drive: Driver, name: str = "r", blocks: Any = PROMPTS[0], **changes: Any) -> Any:
    (decided,) = drive("requests", request(name, blocks, **changes))
    return decided


def stored(drive: Driver, worker_id: str, blocks: Any, seq: int = 1) -> None:
    packed = pack_u64(blocks)
    drive(
        "kv-events",
        BlocksStored(worker_id=worker_id, worker_epoch=drive.epoch(worker_id), seq=seq, sequence_hashes=packed),
    )


def lost(drive: Driver, name: str) -> Any:
    return WorkerLost(owner_epoch=0, worker_id=name, worker_epoch=drive.epoch(name))


def rule(policy: Any, **limits: Any) -> DisaggConfig:
    return DisaggConfig(policy=policy, **limits)


def isl(most: int, ratio: float, policy: Any = "isl_bounding", **limits: Any) -> DisaggConfig:
    return rule(policy, eff_isl_threshold=most, eff_isl_ratio_threshold=ratio, **limits)
