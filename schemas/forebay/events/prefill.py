"""Where the prompt of a decode pool's request is computed: a part of decisions."""

from typing import Literal

from forebay.events.base import Count, Part

PrefillReason = Literal[
    "always",
    "never",
    "long_prompt",
    "short_prompt",
    "uncached_prompt",
    "prefill_idle",
    "prefill_busy",
    "decode_busy",
    "no_prefill_worker",
    "failed",
    "begun",
]


class PrefillPlace(Part, frozen=True, kw_only=True):
    """Where the prompt of a decode pool's request is computed, and why.

    Attributes:
        remote: whether the prefill pool computes the prompt; otherwise the decode worker does.
        reason: `always` and `never`: the policy has this name. `long_prompt`, `short_prompt`: by the policy's limits of
            length. `uncached_prompt`: the prompt is short, but the decode worker has cached too small a share of it.
            `prefill_idle`, `decode_busy`: load sends the prompt to the prefill pool. `prefill_busy`: the prefill pool
            is too busy, so the decode worker computes the prompt. `no_prefill_worker`: no prefill worker is available.
            `failed`: earlier attempts failed, so the last attempt uses no other worker. `begun`: earlier attempts have
            emitted tokens, and the decode worker only continues the response.
        uncached_tokens: prompt tokens that the selected decode worker would compute; null if not checked.
        prefill_waiting: requests that wait at the prefill pool's workers. Of the requests of each worker, one counts as
            running and all others count as waiting. Null if not checked.
        prefill_busy: whether the selected prefill worker is above `prefill_busy_threshold`; null if not checked.
        decode_busy: whether the selected decode worker is above `decode_busy_threshold`; null if not checked.
    """

    remote: bool
    reason: PrefillReason
    uncached_tokens: Count | None = None
    prefill_waiting: Count | None = None
    prefill_busy: bool | None = None
    decode_busy: bool | None = None
