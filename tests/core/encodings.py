"""Requests with images that an encode worker prepares."""

from typing import Any

from forebay.events.decisions import RequestRouted
from forebay.events.progress import EncodeFinished
from tests.core.worlds import ENCODED, MEDIA, PROMPTS, Driver, request


def staged(*encoders: str, **router: Any) -> Driver:
    return Driver().fleet("a", "b", **router).encoders(*encoders)


def ask(drive: Driver, name: str = "r", **changes: Any) -> Any:
    (decided,) = drive("requests", request(name, PROMPTS[0], media=(MEDIA,), **changes))
    return decided


def progress_fields(routed: RequestRouted) -> dict[str, Any]:
    names = ("request_id", "attempt", "worker_id", "worker_epoch", "owner_epoch")
    return {name: getattr(routed, name) for name in names}


def encoded(drive: Driver, routed: RequestRouted) -> list[Any]:
    return drive("progress", EncodeFinished(**progress_fields(routed), encoded=ENCODED))
