"""The summary of a progress event is filled with its fields."""

from typing import Any, get_args

import pytest

from forebay.events.media import Encoded
from forebay.events.progress import (
    EncodeFinished,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    ProgressEvent,
    RequestFinished,
    RequestProgress,
)
from forebay.events.transfer import Prefilled

COMMON: dict[str, Any] = {"request_id": "r", "attempt": 1, "worker_id": "w", "worker_epoch": 7, "owner_epoch": 0}
ENCODED = Encoded(descriptor=b"", shape=(576, 4096), dtype="bfloat16", checksum="0" * 16)
PREFILLED = Prefilled(
    worker_id="w", worker_epoch=7, model="m", connector="tcp", descriptor=b"", tokens=12_000, lease_us=2_500_000
)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (OutputGrown(**COMMON, output_tokens=64), "64 tokens"),
        (RequestFinished(**COMMON, finish_reason="stop"), "finished (stop)"),
        (PrefillFailed(**COMMON, error="too long"), "prefill failed (too long)"),
        (EncodeFinished(**COMMON, encoded=ENCODED), "images and videos encoded as 576 x 4096 bfloat16"),
        (PrefillFinished(**COMMON, prefilled=PREFILLED), "prefill finished, KV of 12,000 tokens kept for 2.5 s"),
    ],
)
def test_a_summary_shows_fields(event: ProgressEvent, text: str) -> None:
    assert event.SUMMARY.format(event) == text


@pytest.mark.parametrize("kind", get_args(RequestProgress))
def test_every_progress_event_has_a_summary(kind: type[ProgressEvent]) -> None:
    assert kind.SUMMARY
