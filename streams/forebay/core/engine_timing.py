"""How long an engine step takes: the polynomials of Dynamo's mocker, in integer microseconds.

Source: Dynamo lib/mocker `perf_model.rs`; measured there, not here. Only + - * / : every machine agrees.
"""

US_PER_MS = 1000


def prefill_us(new_tokens: int) -> int:
    """Time to compute `new_tokens` prompt tokens in one step; nothing to compute takes no time."""
    assert new_tokens >= 0
    if new_tokens == 0:
        return 0
    return round((4.209989e-07 * new_tokens * new_tokens + 1.518344e-02 * new_tokens + 16.50142) * US_PER_MS)


def decode_us(active_blocks: int, total_blocks: int) -> int:
    """Time to decode one token of sequences whose contexts are `active_blocks` together, of `total_blocks`."""
    assert active_blocks >= 0
    assert total_blocks > 0
    usage = min(active_blocks / total_blocks, 1.0)
    return round(max(1.0, -25.74 * usage * usage + 54.01 * usage + 5.74) * US_PER_MS)
