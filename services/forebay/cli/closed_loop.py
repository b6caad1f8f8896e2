"""`forebay replay diff --closed-loop`: what a comparison hands over at its fork, played by the simulator.

Both policies are simulated, history's too: what its simulation and its recording differ by is the simulator's own
error, and a difference between the two simulations that is smaller says nothing.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from forebay.events.requests import RequestCancelled, RequestSubmitted, Sampling
from forebay.events.topics import CONTROL, REQUESTS
from forebay.ingress.errors import Unusable
from forebay.replay.handover import Asked, Handover, Said
from forebay.simulate.cluster import Arrival
from forebay.simulate.outcome import Outcome, Served, summary
from forebay.simulate.resumed import NotSimulable, rank_keys, resume

RECORDED, HISTORY, ALTERNATIVE = "history, recorded", "history, simulated", "alternative, simulated"
OUTPUT_TOKENS_MAX = (1 << 31) - 1  # what a request may ask for

OnRun = Callable[[str, int, int], None]


class ClosedLoop(msgspec.Struct, kw_only=True):
    """History as recorded, and both policies simulated from the fork on.

    Attributes:
        after_s: from the fork to the end of the recording.
        requests: that history finished, of those that came after the fork: the figures are of these.
        under_way: requests under way at the fork, which begin anew at it and are in no figure.
        assumed: requests that history did not finish; their answers are taken to be as long as the others' median.
        speedup: how much faster than their model the engines are taken to be.
        runs: by name, the figures as `forebay simulate` prints them.
        notes: what these mean, for people.
    """

    after_s: float
    requests: int
    under_way: int
    assumed: int
    speedup: float
    runs: dict[str, dict[str, Any]]
    notes: list[str]


def closed_loop(handover: Handover, end_us: int, speedup: float, progress: OnRun) -> ClosedLoop:
    """Simulate both from the fork on; `end_us` is the owner's clock at the end of the recording.

    `progress` is called with the name of the run, the requests that arrived and their total. Raises Unusable.
    """
    asked = handover.asked
    ids = _unique([one.request_id for one in asked])
    finished = [one.output_tokens for one in asked if one.output_tokens]
    if not finished:
        raise Unusable("--closed-loop: history finished no request after the fork, so no answer's length is known")
    median = round(statistics.median(finished))
    compared = [(name, one) for name, one in zip(ids, asked, strict=True) if one.output_tokens and not one.under_way]
    assumed = sum(not one.output_tokens for one in asked)
    keys = rank_keys(handover.states[0])
    runs = {RECORDED: _recorded([one for _, one in compared], keys)}
    for name, state, said in zip((HISTORY, ALTERNATIVE), handover.states, handover.said, strict=True):
        arrivals = _arrivals(ids, asked, said, median)

        def on_arrived(done: int, run: str = name) -> None:
            progress(run, done, len(asked))

        try:
            resumed = resume(state, arrivals, on_arrived, speedup=speedup)
        except NotSimulable as error:
            raise Unusable(f"--closed-loop: {error}") from None
        outcome = Outcome([resumed.served[request_id] for request_id, _ in compared], resumed.digest)
        runs[name] = summary(outcome, len(keys))
    return ClosedLoop(
        after_s=(end_us - handover.at_us) / 1e6,
        requests=len(compared),
        under_way=sum(one.under_way for one in asked),
        assumed=assumed,
        speedup=speedup,
        runs=runs,
        notes=_notes(handover, len(compared), assumed, speedup),
    )


def _unique(names: Sequence[str]) -> list[str]:
    """Ids that come once: a client may use one again when nobody remembers it any more."""
    used: set[str] = set()
    found = []
    for number, name in enumerate(names):
        one = name if name not in used else f"{name}#{number}"
        used.add(one)
        found.append(one)
    return found


def _recorded(asked: Sequence[Asked], keys: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """The figures of history as its workers told them; some may have joined after the fork."""
    places = {key: number for number, key in enumerate(keys)}
    served = [
        Served(
            arrived_us=one.at_us,
            prompt_tokens=one.prompt_tokens,
            output_tokens=one.output_tokens or 0,
            worker=None if one.worker is None else places.setdefault(one.worker, len(places)),
            cached_tokens=one.cached_tokens,
            first_us=one.first_us or one.last_us,
            last_us=one.last_us,
        )
        for one in asked
    ]
    return summary(Outcome(served), len(places))


def _arrivals(ids: Sequence[str], asked: Sequence[Asked], said: Sequence[Said], median: int) -> list[Arrival]:
    """Everything from outside in the order of its time; of one time, requests come before what is said of them."""
    requests = [
        Arrival(one.at_us, REQUESTS, _submitted(request_id, number, one, one.output_tokens or median))
        for number, (request_id, one) in enumerate(zip(ids, asked, strict=True))
    ]
    cancelled = [
        Arrival(one.cancelled_us, REQUESTS, RequestCancelled(request_id=request_id))
        for request_id, one in zip(ids, asked, strict=True)
        if one.cancelled_us
    ]
    configured = [Arrival(at_us, CONTROL, event) for at_us, event in said]
    return sorted([*requests, *cancelled, *configured], key=lambda arrival: arrival.at_us)


def _submitted(request_id: str, number: int, one: Asked, output_tokens: int) -> RequestSubmitted:
    return RequestSubmitted(
        request_id=request_id,
        model=one.model,
        token_ids=b"",
        withheld_tokens=one.prompt_tokens,
        sequence_hashes=one.sequence_hashes,
        reply_slot=0,
        timeout_us=one.timeout_us,
        tie_seed=one.tie_seed,
        sampling=Sampling(max_tokens=min(output_tokens, OUTPUT_TOKENS_MAX), ignore_eos=True),
        nonce=number,
        lora_name=one.lora_name,
        routing=one.hints,
    )


def _notes(handover: Handover, compared: int, assumed: int, speedup: float) -> list[str]:
    again = sum(one.under_way for one in handover.asked)
    said = [
        f"Figures are of the {compared:,} requests that came after the fork and that history finished, with the "
        "arrival times, prompts and output lengths of the recording.",
        "The difference between history as recorded and history simulated is the simulator's own error: a smaller one "
        "between the two simulations says nothing.",
        "Both simulations begin with the caches as the index had them at the fork, in the index's order, because how "
        f"recently a block was used is not known. Requests under way begin anew there: {again:,}.",
        "Engines are the mock engine's model" + ("." if speedup == 1.0 else f", {speedup:g} times as fast as its GPU."),
    ]
    if handover.joined or handover.lost:
        said.append(
            f"The fleet stays as it was at the fork: that {handover.joined} workers joined and {handover.lost} were "
            "lost later is left out of both simulations."
        )
    if assumed:
        said.append(
            f"{assumed:,} requests that history did not finish are simulated with answers of the median length."
        )
    return said
