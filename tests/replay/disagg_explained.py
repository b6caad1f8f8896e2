"""Requests of prefill and decode workers, step by step."""

from typing import Any

from forebay.events.fleet import WorkerLost
from forebay.events.progress import (
    PrefillFinished,
)
from tests.core.worlds import prefilled_by
from tests.replay.recorder import Recorder


def disaggregated(*prefillers: str, **router: Any) -> Recorder:
    made = Recorder()
    made.disagg(prefillers or ("p", "q"), ("d", "e"), **router)
    return made


def report_progress(made: Recorder, kind: type[Any], name: str = "r", after_us: int = 10, **fields: Any) -> None:
    one = made.world.requests.get(name)
    assert one is not None
    if kind is PrefillFinished:
        fields = {
            "prefilled": prefilled_by(one.worker_id, one.worker_epoch, **{"tokens": 34, "bytes": 34_000, **fields})
        }
    of = {"worker_id": one.worker_id, "worker_epoch": one.worker_epoch, "owner_epoch": 0}
    made("progress", kind(request_id=name, attempt=one.stage_attempt, **of, **fields), after_us)


def lose(made: Recorder, name: str) -> None:
    made("fleet", WorkerLost(owner_epoch=0, worker_id=name, worker_epoch=made.epoch(name)))
