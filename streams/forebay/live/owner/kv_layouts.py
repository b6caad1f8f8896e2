"""Compare the KV block layouts of two workers, for transfer between prefill and decode."""

from forebay.events.fleet import WorkerSpec
from forebay.events.transfer import KvLayout


def find_layout_mismatch(spec: WorkerSpec, other: WorkerSpec) -> str | None:
    """Return why two workers with blocks of the same size cannot exchange KV blocks, or None if they can.

    If a worker does not report its layout, two workers of the same engine count as compatible, because the engine
    checks the layout itself.
    """
    peer = f"{other.worker_id} in the pool {other.pool}"
    if spec.kv_layout is None or other.kv_layout is None:
        if spec.engine == other.engine:
            return None
    elif spec.kv_layout == other.kv_layout:
        return None
    return f"its KV block layout is {_describe_blocks(spec)}, but the layout of {peer} is {_describe_blocks(other)}"


def _describe_blocks(spec: WorkerSpec) -> str:
    layout = spec.kv_layout
    return f"not reported by {spec.engine}" if layout is None else _describe_layout(layout)


def _describe_layout(layout: KvLayout) -> str:
    layers = f", {layout.layers} layer{'s' if layout.layers > 1 else ''}" if layout.layers else ""
    return f"{layout.dtype}, {layout.block_bytes} bytes{layers}, {layout.connector} connector"
