"""What engines have in common that keep the KV of prompts for each other in ways of their own."""

from forebay.events.transfer import DESCRIPTOR_BYTES_MAX, Prefilled
from forebay.events.work import WorkItem


class Unfetchable(ValueError):
    """KV that an engine cannot fetch, or offer to be fetched; the text is fit for the log."""


def fetchable(prefilled: Prefilled | None, connector: str, model: str, prompt_tokens: int) -> Prefilled:
    """The same, if it is of a whole prompt of `model`, to be fetched by `connector`. Raises Unfetchable."""
    if prefilled is None:
        raise Unfetchable("nothing says where the KV of the prompt is")
    if prefilled.connector != connector:
        raise Unfetchable(f"its KV is moved by {prefilled.connector}, this worker fetches by {connector}")
    if prefilled.model != model:
        raise Unfetchable(f"its KV is of the model {prefilled.model}, this worker has {model}")
    if prefilled.tokens != prompt_tokens:
        raise Unfetchable(f"its KV is of {prefilled.tokens} tokens, the prompt has {prompt_tokens}")
    return prefilled


def offered(
    item: WorkItem, worker_id: str, model: str, connector: str, descriptor: bytes, *, tokens: int, lease_s: float
) -> Prefilled:
    """What is told of a prompt that was computed here. Raises Unfetchable for a descriptor that is too long."""
    if len(descriptor) > DESCRIPTOR_BYTES_MAX:
        size = len(descriptor)
        raise Unfetchable(f"to say where its KV lies takes {size} bytes: at most {DESCRIPTOR_BYTES_MAX} do")
    return Prefilled(
        worker_id=worker_id,
        worker_epoch=item.worker_epoch,
        model=model,
        connector=connector,
        descriptor=descriptor,
        tokens=tokens,
        lease_us=int(lease_s * 1e6),
    )
