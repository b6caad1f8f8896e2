"""Whether the KV blocks of two workers are alike, so that one can go on with what the other computed."""

from forebay.events.fleet import WorkerSpec
from forebay.events.transfer import KvLayout


def foreign_blocks(spec: WorkerSpec, other: WorkerSpec) -> str | None:
    """Why no KV block of one is of use to the other, naming both; None if it is.

    Workers of one engine that do not say how their blocks lie are taken for alike: the engine checks it itself.
    """
    theirs = f"those of {other.worker_id} in the pool {other.pool}"
    if spec.block_size != other.block_size:
        return f"its KV blocks hold {spec.block_size} tokens, {theirs} hold {other.block_size}"
    if spec.kv_layout is None or other.kv_layout is None:
        if spec.engine == other.engine:
            return None
    elif spec.kv_layout == other.kv_layout:
        return None
    return f"its KV blocks are {_said(spec)}; {theirs} are {_said(other)}"


def _said(spec: WorkerSpec) -> str:
    layout = spec.kv_layout
    return f"{spec.engine}'s, which does not say how they lie" if layout is None else _in_words(layout)


def _in_words(layout: KvLayout) -> str:
    layers = f", {layout.layers} layer{'s' if layout.layers > 1 else ''}" if layout.layers else ""
    return f"{layout.dtype}, {layout.block_bytes} bytes{layers}, by {layout.connector}"
