"""Simulation of recorded requests. Recorded and simulated outcomes use the same numbers for the worker ranks."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from forebay.core.state.holder_bits import HolderKey
from forebay.engine_model.timing import EngineTiming
from forebay.events.control import DisaggConfig, DisaggregationSet
from forebay.events.fleet import FleetEvent, WorkerSpec
from forebay.events.requests import RequestCancelled, RequestSubmitted, Sampling
from forebay.events.snapshots import Chunk
from forebay.events.topics import CONTROL, FLEET, REQUESTS
from forebay.ingress.errors import Unusable
from forebay.replay.observed import ExternalEvent, RecordedRequest
from forebay.simulate.arrivals import Arrival
from forebay.simulate.outcome import RequestOutcome, RequestOutcomes, SimulationOutcome, summary
from forebay.simulate.resumed import MOCKER, NO_TIERS, NotSimulable, ResumedOutcome, SimulatedHardware, resume
from forebay.simulate.settings import KV_BYTES_MAX, Transfer
from forebay.simulate.tiers.settings import FleetTiers
from forebay.simulate.transfer_fit import ObservedTransfer, TransferFit, fit_transfers

ROLES = ("prefill", "decode")
NO_OPTIONS: Mapping[str, float] = {}
OUTPUT_TOKENS_MAX = (1 << 31) - 1  # maximum of `max_tokens` in a request

TimedEvents = Sequence[tuple[int, ExternalEvent]]


class RecordedRequests:
    """Requests of a recording, as input of a simulation. Each request has a unique id.

    Attributes:
        by_id: requests by id, in order of arrival. A repeated id gets a suffix, because clients may use an id again
            once the owner has forgotten it.
        median: median length of the recorded responses in tokens. A request that did not finish is assumed to have a
            response of this length.
    """

    def __init__(self, requests: Sequence[RecordedRequest]) -> None:
        """Assign unique ids to the recorded requests. Raises Unusable if no request finished."""
        self.by_id: dict[str, RecordedRequest] = {}
        for number, one in enumerate(requests):
            repeated = one.request_id in self.by_id
            self.by_id[f"{one.request_id}#{number}" if repeated else one.request_id] = one
        finished = [one.output_tokens for one in requests if one.output_tokens is not None]
        if not finished:
            raise Unusable("no recorded request finished, so no response length is known; use a longer recording")
        self.median = max(1, round(statistics.median(finished)))
        self.assumed = len(requests) - len(finished)

    @property
    def comparable(self) -> dict[str, RecordedRequest]:
        """Requests by id that both arrived and finished in the recorded period."""
        found = self.by_id.items()
        return {name: one for name, one in found if one.output_tokens is not None and not one.in_flight}

    def arrivals(
        self, events: TimedEvents, shift_us: Callable[[int], int] = lambda _: 0, *, placed: bool = False
    ) -> list[Arrival]:
        """Return the requests and `events` as arrivals in order of time. At equal times `events` come before requests.

        Args:
            events: operators' changes and events of `fleet`, with their times.
            shift_us: function that returns for the number of a request the microseconds by which its arrival is
                delayed.
            placed: whether a request that had a single attempt must go to the recorded worker again, and its prefill to
                the recorded prefill worker (by requiring the taint `placement_taint`).
        """
        arrivals = [Arrival(at_us, FLEET if isinstance(one, FleetEvent) else CONTROL, one) for at_us, one in events]
        is_disaggregated = placed and any(one.prefills for one in self.by_id.values())
        for number, (name, one) in enumerate(self.by_id.items()):
            at_us = one.at_us + shift_us(number)
            if is_disaggregated:
                rule = DisaggConfig(policy="always" if one.prefills else "never")
                arrivals.append(Arrival(at_us, CONTROL, DisaggregationSet(model=one.model, disagg=rule)))
            arrivals.append(Arrival(at_us, REQUESTS, self._submission(name, number, one, placed=placed)))
        for number, (name, one) in enumerate(self.by_id.items()):
            if one.cancelled_us:
                cancelled_us = one.cancelled_us + shift_us(number)
                arrivals.append(Arrival(cancelled_us, REQUESTS, RequestCancelled(request_id=name)))
        return sorted(arrivals, key=lambda arrival: arrival.at_us)

    def _submission(self, name: str, number: int, one: RecordedRequest, *, placed: bool) -> RequestSubmitted:
        output_tokens = self.median if one.output_tokens is None else max(1, one.output_tokens)
        hints = one.hints
        if placed and one.worker is not None and one.attempts == 1:
            hints = msgspec.structs.replace(hints, worker_id=one.worker[0], rank=one.worker[1])
            if one.prefiller is not None and one.prefills == 1:
                taints = (*hints.required_taints, placement_taint(one.prefiller[0]))
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


@dataclass(frozen=True, slots=True)
class RecordedSimulation:
    """Simulates the requests of a recording on the worker ranks of the recording.

    Attributes:
        ranks: number of each worker rank. Recorded and simulated outcomes refer to ranks by this number.
        fit: KV transfer model fitted to the recorded transfers; None if the recording has no prefill and decode
            workers.
    """

    requests: RecordedRequests
    ranks: dict[HolderKey, int]
    prefill_workers: tuple[int, ...]
    fit: TransferFit | None

    @classmethod
    def of(
        cls,
        requests: Sequence[RecordedRequest],
        ranks: Iterable[HolderKey],
        specs: Sequence[WorkerSpec],
        link: Mapping[str, float] = NO_OPTIONS,
    ) -> "RecordedSimulation":
        """Prepare simulations of `requests` on `ranks` of the workers `specs`.

        Args:
            requests: recorded requests in order of arrival.
            ranks: all worker ranks of the recording. Each gets a number.
            link: values of `Transfer` fields that the user has set. The other fields are fitted to the recorded
                transfers.

        Raises:
            Unusable: no request finished.
        """
        numbers = {key: number for number, key in enumerate(ranks)}
        prefilling = {spec.worker_id for spec in specs if spec.role == "prefill"}
        return cls(
            RecordedRequests(requests),
            numbers,
            tuple(number for key, number in numbers.items() if key[0] in prefilling),
            _fit_transfers(requests, specs, link),
        )

    def run(
        self,
        state: Sequence[Chunk],
        arrivals: Sequence[Arrival],
        on_done: Callable[[int], object],
        *,
        timing: EngineTiming = MOCKER,
        tiers: FleetTiers = NO_TIERS,
        kv_bytes_per_token: int | None = None,
        **options: Any,
    ) -> ResumedOutcome:
        """Simulate `arrivals`, starting from `state`, and return the outcomes. They refer to ranks by `self.ranks`.

        Args:
            state: chunks of a snapshot without requests.
            arrivals: requests, operators' changes and events of `fleet`, in order of time.
            on_done: called with the number of requests that have arrived so far.
            kv_bytes_per_token: bytes of KV per token in these tiers; None if the recording determines them.
            options: further arguments of `resume`.

        Raises:
            Unusable: the state cannot be simulated.
        """
        transfer = Transfer() if self.fit is None else self.fit.transfer
        if kv_bytes_per_token is not None:
            transfer = msgspec.structs.replace(transfer, kv_bytes_per_token=kv_bytes_per_token)
        try:
            hardware = SimulatedHardware(timing, transfer, tiers)
            resumed = resume(state, arrivals, on_done, hardware=hardware, **options)
        except NotSimulable as error:
            raise Unusable(str(error)) from None
        numbers = [self.ranks[key] for key in resumed.ranks]
        for served in resumed.served.values():
            served.worker = None if served.worker is None else numbers[served.worker]
            served.prefiller = None if served.prefiller is None else numbers[served.prefiller]
        return resumed

    def observed(self) -> dict[str, RequestOutcome]:
        """Return the recorded outcome of each comparable request by id. Ranks without a number get the next numbers."""
        ranks = dict(self.ranks)
        return {name: _observed_outcome(one, ranks) for name, one in self.requests.comparable.items()}

    def summarize(self, outcomes: Iterable[RequestOutcome], digest: str = "") -> dict[str, Any]:
        """Return the metrics of recorded or simulated outcomes, as `forebay simulate` prints them."""
        served = RequestOutcomes(outcomes)
        numbers = [number for one in served for number in (one.worker, one.prefiller) if number is not None]
        workers = max(len(self.ranks), max(numbers, default=-1) + 1)
        return summary(SimulationOutcome(served, digest, prefill_workers=self.prefill_workers), workers)


def placement_taint(worker_id: str) -> str:
    """Return the taint that only prefill worker `worker_id` gets. A request that requires it is prefilled there."""
    return f"recorded placement: {worker_id}"


def _observed_outcome(one: RecordedRequest, ranks: dict[HolderKey, int]) -> RequestOutcome:
    """Return the recorded outcome of a finished request, on the recorded owner's clock. Unknown ranks are added."""

    def number(rank: HolderKey | None) -> int | None:
        return None if rank is None else ranks.setdefault(rank, len(ranks))

    outcome = RequestOutcome(
        arrived_us=one.at_us,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens or 0,
        worker=number(one.worker),
        cached_tokens=one.cached_tokens,
        first_us=one.first_us or one.last_us,
        last_us=one.last_us,
        prefiller=number(one.prefiller),
        prefilled_us=one.prefilled_us,
        transferred_bytes=one.transferred_bytes,
        transfer_us=one.transfer_us,
    )
    outcome.record_loads(one.onboarded)
    return outcome


def _fit_transfers(
    requests: Sequence[RecordedRequest], workers: Sequence[WorkerSpec], link: Mapping[str, float]
) -> TransferFit | None:
    """Return the KV transfer model fitted to recorded transfers, or None without prefill and decode workers.

    Bytes per token come from the workers' KV layouts where these are known, otherwise from the recorded sizes.
    """
    if not any(spec.role in ROLES for spec in workers):
        return None
    block_sizes = {spec.model: spec.block_size for spec in workers}
    prefilled = [one for one in requests if one.prefiller is not None]
    per_token = [
        spec.kv_layout.block_bytes / spec.block_size
        for spec in workers
        if spec.role in ROLES and spec.kv_layout is not None
    ] or [
        one.kept_bytes / (-(-one.prompt_tokens // block_sizes[one.model]) * block_sizes[one.model])
        for one in prefilled
        if one.kept_bytes and one.model in block_sizes
    ]
    transfers = [
        ObservedTransfer(one.prefiller, one.worker, one.transferred_bytes, one.transfer_us, one.first_us)
        for one in prefilled
        if one.prefiller is not None and one.worker is not None and one.transferred_bytes
    ]
    bytes_per_token = round(statistics.median(per_token)) if per_token else Transfer().kv_bytes_per_token
    return fit_transfers(transfers, max(1, min(KV_BYTES_MAX, bytes_per_token)), link)
