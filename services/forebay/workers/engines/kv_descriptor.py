"""Descriptors of KV that engines transfer by their own connectors."""

from forebay.events.transfer import DESCRIPTOR_BYTES_MAX, Prefilled
from forebay.events.work import WorkItem


class Unfetchable(ValueError):
    """KV that an engine cannot fetch or offer. The message is for the log."""


def fetchable(prefilled: Prefilled | None, connector: str, model: str, prompt_tokens: int) -> Prefilled:
    """Return `prefilled` if `connector` can fetch it for the whole prompt and `model`. Raises Unfetchable."""
    if prefilled is None:
        raise Unfetchable("the request has no KV descriptor")
    if prefilled.connector != connector:
        raise Unfetchable(f"its KV is transferred by {prefilled.connector}, this worker uses {connector}")
    if prefilled.model != model:
        raise Unfetchable(f"its KV is of model {prefilled.model}, this worker runs {model}")
    if prefilled.tokens != prompt_tokens:
        raise Unfetchable(f"its KV covers {prefilled.tokens} tokens, the prompt has {prompt_tokens}")
    return prefilled


def offered(
    item: WorkItem, worker_id: str, model: str, connector: str, descriptor: bytes, *, tokens: int, lease_s: float
) -> Prefilled:
    """Return the descriptor of a prompt computed here. Raises Unfetchable if it is too long."""
    if len(descriptor) > DESCRIPTOR_BYTES_MAX:
        size = len(descriptor)
        raise Unfetchable(f"the KV descriptor has {size} bytes, more than {DESCRIPTOR_BYTES_MAX}")
    return Prefilled(
        worker_id=worker_id,
        worker_epoch=item.worker_epoch,
        model=model,
        connector=connector,
        descriptor=descriptor,
        tokens=tokens,
        lease_us=int(lease_s * 1e6),
    )
