"""Requests of a recorded history, as a simulation is asked them again, and as history answered them."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from forebay.core.state.holder_bits import HolderKey
from forebay.events.control import DisaggConfig, DisaggregationSet
from forebay.events.fleet import FleetEvent, WorkerSpec
from forebay.events.requests import RequestCancelled, RequestSubmitted, Sampling
from forebay.events.topics import CONTROL, FLEET, REQUESTS
from forebay.ingress.errors import Unusable
from forebay.replay.diff.handover import RecordedRequest
from forebay.replay.observed import ExternalEvent
from forebay.simulate.arrivals import Arrival
from forebay.simulate.outcome import RequestOutcome
from forebay.simulate.settings import KV_BYTES_MAX, Transfer
from forebay.simulate.transfer_fit import ObservedTransfer, TransferFit, fit_transfers

ROLES = ("prefill", "decode")
NOTHING: Mapping[str, float] = {}
OUTPUT_TOKENS_MAX = (1 << 31) - 1  # what a request may ask for


class RecordedRequests:
    """What was asked, under ids that come once.

    Attributes:
        asked: by id, in the order in which they came: a client may use an id again when nobody remembers it any more.
        median: the length of an answer that history did not finish.
        assumed: how many these are.
    """

    def __init__(self, asked: Sequence[RecordedRequest]) -> None:
        """Raises Unusable when history finished none of them."""
        self.asked: dict[str, RecordedRequest] = {}
        for number, one in enumerate(asked):
            known = one.request_id in self.asked
            self.asked[f"{one.request_id}#{number}" if known else one.request_id] = one
        finished = [one.output_tokens for one in asked if one.output_tokens is not None]
        if not finished:
            raise Unusable("history finished no request, so no answer's length is known")
        self.median = max(1, round(statistics.median(finished)))
        self.assumed = len(asked) - len(finished)

    @property
    def comparable(self) -> dict[str, RecordedRequest]:
        """Those that history answered from beginning to end."""
        found = self.asked.items()
        return {name: one for name, one in found if one.output_tokens is not None and not one.under_way}

    def arrivals(
        self,
        said: Sequence[tuple[int, ExternalEvent]],
        later: Callable[[int], int] = lambda _: 0,
        *,
        placed: bool = False,
    ) -> list[Arrival]:
        """Everything from outside in the order of its time; of one time, what is `said` comes first.

        Args:
            said: what operators said, and facts of the fleet.
            later: how much later than it did a request comes, by its number, in microseconds.
            placed: who was sent to one worker must go there again, and its prompt be computed where it was: by a worker
                with the taint `placed_at`, if that was another.
        """
        arrivals = [Arrival(at_us, FLEET if isinstance(one, FleetEvent) else CONTROL, one) for at_us, one in said]
        apart = placed and any(one.prefills for one in self.asked.values())
        for number, (name, one) in enumerate(self.asked.items()):
            at_us = one.at_us + later(number)
            if apart:
                rule = DisaggConfig(policy="always" if one.prefills else "never")
                arrivals.append(Arrival(at_us, CONTROL, DisaggregationSet(model=one.model, disagg=rule)))
            arrivals.append(Arrival(at_us, REQUESTS, self._submitted(name, number, one, placed=placed)))
        for number, (name, one) in enumerate(self.asked.items()):
            if one.cancelled_us:
                gone_us = one.cancelled_us + later(number)
                arrivals.append(Arrival(gone_us, REQUESTS, RequestCancelled(request_id=name)))
        return sorted(arrivals, key=lambda arrival: arrival.at_us)

    def _submitted(self, name: str, number: int, one: RecordedRequest, *, placed: bool) -> RequestSubmitted:
        output_tokens = self.median if one.output_tokens is None else max(1, one.output_tokens)
        hints = one.hints
        if placed and one.worker is not None and one.attempts == 1:
            hints = msgspec.structs.replace(hints, worker_id=one.worker[0], rank=one.worker[1])
            if one.prefiller is not None and one.prefills == 1:
                taints = (*hints.required_taints, placed_at(one.prefiller[0]))
                hints = msgspec.structs.replace(hints, required_taints=taints)
        return RequestSubmitted(
            request_id=name,
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
            routing=hints,
        )


def placed_at(worker_id: str) -> str:
    """The taint by which a request asks for a prefill worker."""
    return f"as lived: {worker_id}"


def transfers_of(
    asked: Iterable[RecordedRequest], workers: Sequence[WorkerSpec], given: Mapping[str, float] = NOTHING
) -> TransferFit | None:
    """How KV moves between these workers, fitted to the transfers of `asked`; None where none moves.

    Bytes a token are those of the workers' own layout, where they have one. What of `Transfer` is `given` is so.
    """
    if not any(spec.role in ROLES for spec in workers):
        return None
    sizes = {spec.model: spec.block_size for spec in workers}
    asked = [one for one in asked if one.prefiller is not None]
    per_token = [
        spec.kv_layout.block_bytes / spec.block_size
        for spec in workers
        if spec.role in ROLES and spec.kv_layout is not None
    ] or [
        one.kept_bytes / (-(-one.prompt_tokens // sizes[one.model]) * sizes[one.model])
        for one in asked
        if one.kept_bytes and one.model in sizes
    ]
    moved = [
        ObservedTransfer(one.prefiller, one.worker, one.transferred_bytes, one.transfer_us, one.first_us)
        for one in asked
        if one.prefiller is not None and one.worker is not None and one.transferred_bytes
    ]
    fitting = round(statistics.median(per_token)) if per_token else Transfer().kv_bytes_per_token
    return fit_transfers(moved, max(1, min(KV_BYTES_MAX, fitting)), given)


def answered(one: RecordedRequest, places: Mapping[HolderKey, int]) -> RequestOutcome:
    """What became of a request that history finished, by its owner's clock."""
    return RequestOutcome(
        arrived_us=one.at_us,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens or 0,
        worker=None if one.worker is None else places[one.worker],
        cached_tokens=one.cached_tokens,
        first_us=one.first_us or one.last_us,
        last_us=one.last_us,
        prefiller=None if one.prefiller is None else places[one.prefiller],
        prefilled_us=one.prefilled_us,
        transferred_bytes=one.transferred_bytes,
        transfer_us=one.transfer_us,
    )
