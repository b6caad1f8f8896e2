"""Entry of a request in the queue of its pool."""

from forebay.core.routing.eligibility import requirements_key
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.queue import QueuedRequest
from forebay.events.control import PoolConfigured


def queued_request(request: ActiveRequest, pool: PoolConfigured) -> QueuedRequest:
    wanted = requirements_key(request.submitted)
    if pool.role == "decode":
        # Candidates also depend on the prompt length. Short requests must not wait behind long ones.
        wanted = (*wanted, request.uncached_tokens.bit_length())
    return QueuedRequest(
        request_id=request.submitted.request_id,
        offset=request.submitted.offset,
        policy_class=request.submitted.hints.policy_class,
        uncached_tokens=request.uncached_tokens,
        priority=request.submitted.hints.priority,
        strict_priority=request.submitted.hints.strict_priority,
        arrival_us=request.queued_at_us,
        demand=wanted,
        tenant=request.submitted.tenant,
        weight=request.submitted.weight,
        lora_name=request.submitted.lora_name,
    )
