"""Word the entries of a timeline. Every sentence about a request's events and decisions is here."""

from collections.abc import Sequence

from forebay.core.world import CORE_VERSION
from forebay.events.decisions import (
    AdapterPlaced,
    KvReleased,
    OwnerClaimed,
    PrefillPlace,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RouteAnswered,
)
from forebay.events.fleet import WorkerDraining, WorkerFact, WorkerRecovered, WorkerSuspect
from forebay.events.pools import PoolChoice, SkipReason
from forebay.events.progress import (
    AttemptRejected,
    EncodeFailed,
    EncodeFinished,
    FirstTokenEmitted,
    OnboardedTokens,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    RequestProgress,
    TransferFailed,
)
from forebay.journal.release import rules_text
from forebay.replay.explain.explanation import FirstTokenTiming, Routing

SENT = {"encode": "encode sent", "prefill": "prefill sent", "decode": "decode sent"}
PLACES = {"host": "host memory", "disk": "disk", "store": "the shared store"}
SKIPPED: dict[SkipReason, str] = {
    "unknown": "is no pool of the model",
    "drained": "is drained",
    "block_size": "has blocks of another size",
    "no_workers": "has no ready worker",
    "no_eligible_worker": "has no eligible worker",
    "busy": "has only busy workers",
    "full": "is full",
    "failed": "had the failed attempt",
}


def progress_text(event: RequestProgress, *, keeps_kv: bool, saved_us: int | None) -> tuple[str, str]:
    """Return the kind of an entry and its sentence, for every event but a first token."""
    name = f"{event.worker_id}, attempt {event.attempt},"
    match event:
        case OutputGrown():
            return "output_grown", f"{event.output_tokens:,} output tokens so far"
        case RequestFinished():
            return "finished", f"finished ({event.finish_reason}) with {event.output_tokens:,} output tokens"
        case RequestFailed():
            return "failed", f"{name} failed: {event.error}"
        case AttemptRejected():
            return "rejected", f"{name} rejected it: {event.error}"
        case EncodeFinished():
            cached = f"; the embeddings of {event.cached} were in its cache" if event.cached else ""
            return "encoded", f"{event.worker_id} encoded its images and videos{cached}"
        case EncodeFailed():
            return "not_encoded", f"{name} could not encode its images and videos: {event.error}"
        case PrefillFinished():
            return "prefilled", prefilled_text(event, saved_us)
        case PrefillFailed():
            return "not_prefilled", f"{name} could not compute its prompt: {event.error}"
        case TransferFailed():
            return "not_transferred", f"{name} could not fetch its {'KV' if keeps_kv else 'embeddings'}: {event.error}"
        case _:  # an event without a sentence of its own
            tag = str(type(event).__struct_config__.tag)
            return tag.rpartition(".")[2], f"{name} {event.SUMMARY.format(event)}"


def end_text(record: RequestRejected | RequestAborted | RouteAnswered) -> str:
    match record:
        case RequestRejected():
            state = "rejected"
        case RequestAborted():
            state = "aborted"
        case RouteAnswered():
            state = "would be rejected"
    return f"{state} ({record.reason}): {record.message}"


def choice_text(choice: PoolChoice, prompt_tokens: int | None) -> str:
    wanted = choice.wanted
    why = {
        "first": f"{wanted} is the first pool by name",
        "grid": f"the grid names {wanted}",
        "override": f"the priority of the request selects {wanted}",
        "canary": f"{wanted} is a canary of {choice.base}, and the request belongs to its share",
        "worker": f"{wanted} has the worker that the request names",
        "session": f"{wanted} has the rank that serves the session",
        "retry": f"{wanted} is faster than the pool of the failed attempt",
        "moved": f"the request leaves {wanted}",
    }[choice.reason]
    if choice.row is not None and choice.target_ms is not None:
        tokens = "" if prompt_tokens is None else f"{prompt_tokens:,} prompt tokens and "
        why += f" (row {choice.row}, column {choice.column}: {tokens}a latency target of {choice.target_ms:,.6g} ms)"
    skipped = "; ".join(f"{one.pool} {SKIPPED[one.reason]}" for one in choice.skipped)
    what = "prefill pool" if choice.role == "prefill" else "pool"
    return f"{what} {choice.pool}: {why}" + (f"; {skipped}" if skipped else "")


def held_text(record: RequestHeld) -> str:
    return f"held in queue class {record.queue_class}, {record.ahead} requests ahead"


def routed_text(routing: Routing) -> str:
    seen = routing.candidates[routing.winner].seen
    where = f"{seen.worker_id}/{seen.rank}" if any(one.seen.rank for one in routing.candidates) else seen.worker_id
    place = "" if routing.prefill is None else f"; {place_text(routing.prefill)}"
    if not routing.attempt:
        would = "would be held, then routed to" if routing.would_wait else "would be routed to"
        return f"{would} {where}: {routing.why}{place}"
    again = f"attempt {routing.attempt}, " if routing.attempt > 1 else ""
    sent = SENT.get(routing.stage, "routed")
    waited = f" after {routing.waited_us / 1e6:.3f} s in the queue" if routing.waited_us else ""
    return f"{again}{sent} to {where}{waited}: {routing.why}{place}"


def place_text(place: PrefillPlace) -> str:
    tokens, requests = place.uncached_tokens or 0, place.prefill_waiting
    uncached = "1 token is not cached" if tokens == 1 else f"{tokens:,} tokens are not cached"
    wait = "1 request waits" if requests == 1 else f"{requests or 0:,} requests wait"
    waiting = "" if requests is None else f"; {wait} at prefill workers"
    why = {
        "always": "the pool computes every prompt remotely",
        "never": "the pool computes no prompt remotely",
        "long_prompt": f"{uncached} on the decode worker, which is above the limit{waiting}",
        "short_prompt": f"only {uncached}" if tokens else "the whole prompt is cached",
        "uncached_prompt": f"{uncached} on the decode worker, a share above the limit",
        "prefill_idle": "the selected prefill worker is not busy",
        "prefill_busy": f"prefill workers are busy{waiting}",
        "decode_busy": "the selected decode worker is busy",
        "no_prefill_worker": "no prefill worker is eligible",
        "failed": "the previous attempt failed, so this one does not depend on another worker",
        "begun": "the response has already begun and only continues",
    }[place.reason]
    return f"prompt computed {'by a prefill worker' if place.remote else 'on the decode worker'}: {why}"


def prefilled_text(event: PrefillFinished, saved_us: int | None) -> str:
    kept = event.prefilled
    size = f", {kept.bytes:,} bytes" if kept.bytes else ""
    cached = f", {kept.cached_tokens:,} of them from its cache" if kept.cached_tokens else ""
    lease = f"it keeps their KV{size} for {kept.lease_us / 1e6:g} s"
    loaded = onboarded_text(event.onboarded, saved_us)
    return f"{event.worker_id} computed its prompt: {kept.tokens:,} tokens{cached}{loaded}; {lease}"


def placed_text(record: AdapterPlaced) -> str:
    unloaded = f", which unloads {record.unloaded} first" if record.unloaded else ""
    why = "no ready worker has it" if record.reason == "missing" else "too many requests wait for its workers"
    return (
        f"the owner loads the adapter {record.lora_name} on {record.target.worker_id}{unloaded}: {why};"
        f" {record.waiting:,} waiting, lowest cost of {record.candidates:,} candidates: {record.terms.cost:.4g}"
    )


def released_text(record: KvReleased) -> str:
    why = {
        "worker_lost": "the worker that should fetch it is lost",
        "not_fetched": "it could not be fetched",
        "not_needed": "the response had begun and continued without it",
        "request_ended": "the request ended without it",
        "lease_over": "no worker could fetch it before the lease expired",
        "foreign_descriptor": "its descriptor names another worker, epoch or model",
    }[record.reason]
    return f"{record.holder.worker_id} releases the KV of attempt {record.attempt}: {why}"


def takeover_text(claim: OwnerClaimed) -> str:
    is_own = claim.core_version == CORE_VERSION
    rules = "" if is_own else f", with {rules_text(claim.core_version, claim.release)}"
    return f"router {claim.owner_id} takes over the group{rules}"


def first_token_text(first: FirstTokenTiming, event: FirstTokenEmitted, prompt_tokens: int | None) -> str:
    of_prompt = "" if prompt_tokens is None else f" of {prompt_tokens:,}"
    loaded = onboarded_text(event.onboarded, first.saved_us)
    if first.transferred_bytes:
        fetched = f"{first.transferred_bytes:,} bytes of KV fetched in {first.transfer_us / 1e3:,.1f} ms"
        tokens = f"{first.cached_tokens:,}{of_prompt} prompt tokens not computed here"
        return f"first token from {first.worker_id}: {tokens}, {fetched}{loaded}"
    expected = "" if first.predicted_tokens is None else f", the router expected {first.predicted_tokens:,}"
    cached = f"{first.cached_tokens:,}{of_prompt} prompt tokens were cached"
    return f"first token from {first.worker_id}: {cached}{expected}{loaded}"


def worker_text(event: WorkerFact) -> tuple[str, str]:
    """Return what happened to the request's worker, as an identifier and as a sentence."""
    because = f" ({event.reason})" if event.reason else ""
    match event:
        case WorkerSuspect():
            return "worker_suspect", f"its worker {event.worker_id} is suspect{because}: it gets no new requests"
        case WorkerRecovered():
            return "worker_recovered", f"its worker {event.worker_id} has recovered{because}"
        case WorkerDraining():
            return "worker_draining", f"its worker {event.worker_id} is draining{because}: it gets no new requests"
        case _:
            return "worker_lost", f"its worker {event.worker_id} is lost{because}"


def onboarded_text(onboarded: Sequence[OnboardedTokens], saved: int | None) -> str:
    """Return how many tokens were loaded from where and what this saved, as a part of a sentence; empty for none."""
    loads = [f"{one.tokens:,} from {PLACES[one.tier]} in {one.us / 1e3:,.1f} ms" for one in onboarded]
    if not loads:
        return ""
    if saved is None:
        return f"; loaded {', '.join(loads)}"
    compared = "sooner" if saved >= 0 else "later"
    return f"; loaded {', '.join(loads)}, {abs(saved) / 1e3:,.1f} ms {compared} than by computing them"
