"""Reconstructed engine work between recorded events matches hand-written schedules."""

import numpy as np

from forebay.engine_model.model import EngineConfig
from forebay.simulate.profiles.observed import EngineRun, ObservedRequest
from forebay.simulate.profiles.timeline import COSTS, amounts

STEP, TOKENS, PAIRS, DECODES, SEQUENCES, CONTEXT = range(len(COSTS))
CONFIG = EngineConfig(vocabulary=None, block_size=16, kv_blocks_total=1000, max_num_seqs=8, max_num_batched_tokens=100)


def request(routed: int, prompt: int, outputs: int, first: int, last: int, cached: int = 0) -> ObservedRequest:
    return ObservedRequest(routed, prompt, b"", outputs, cached, first, last)


def run(*requests: ObservedRequest) -> EngineRun:
    return EngineRun("w", CONFIG, (), list(requests))


def test_lone_request() -> None:
    (one,), found = amounts(run(request(1_000, 150, 11, 3_000, 8_000, cached=32)))
    assert one.routed_us == 1_000
    ttft, itl = found[:, 0]
    pairs = 118 * 32 + 118 * 119 // 2
    assert list(ttft) == [2, 118, pairs, 0, 0, 0]  # 118 tokens in steps of up to 100
    assert list(itl) == [1, 0, 0, 1, 1, 150 + 11 / 2 + 8]


def test_two_requests_decode_together() -> None:
    """The second request arrives in the middle of a decode step of the first, and joins the next step."""
    first = request(0, 50, 21, 1_000, 21_000)
    second = request(10_000, 30, 6, 11_500, 16_500)
    (_, other), found = amounts(run(first, second))
    assert other is second
    ttft, itl = found[:, 1]
    np.testing.assert_allclose(ttft[[STEP, TOKENS, PAIRS, DECODES, SEQUENCES]], [1.5, 30, 465, 1.5, 1.5])
    np.testing.assert_allclose(itl[[STEP, DECODES, SEQUENCES]], [1, 1, 2], rtol=1e-6)
    itl = found[1, 0]
    np.testing.assert_allclose(itl[[STEP, DECODES]], [1, 1], rtol=1e-6)
    np.testing.assert_allclose(itl[[TOKENS, PAIRS]], [30 / 20, 465 / 20])
    assert 1 < itl[SEQUENCES] < 2


def test_prompts_prefilled_in_one_step_finish_together() -> None:
    _, found = amounts(run(request(0, 40, 1, 900, 900), request(0, 50, 1, 900, 900)))
    assert found[0, :, TOKENS].tolist() == [90, 90]
    assert found[0, :, STEP].tolist() == [1, 1]
    assert not found[1].any()


def test_waiting_request_counts_iterations_of_running_ones() -> None:
    config = EngineConfig(vocabulary=None, block_size=16, kv_blocks_total=1000, max_num_seqs=1)
    requests = [request(0, 40, 101, 1_000, 101_000), request(2_000, 40, 1, 102_000, 102_000)]
    _, found = amounts(EngineRun("w", config, (), requests))
    assert 95 < found[0, 1, STEP] < 102


def test_left_out_request_is_load_but_no_row() -> None:
    stopped = ObservedRequest(0, 20, b"", 100, 0, 500, 0, 4_500, "cancelled or failed")
    unfinished = ObservedRequest(0, 20, b"", 100, 0, 500, 0, 0, "did not finish")
    compared, found = amounts(run(stopped, unfinished, request(1_000, 20, 5, 2_500, 4_500)))
    assert [one.routed_us for one in compared] == [1_000]
    np.testing.assert_allclose(found[1, 0, SEQUENCES], 2, rtol=1e-6)


def test_a_run_without_requests() -> None:
    compared, found = amounts(run(ObservedRequest(0, 20, b"", 100)))
    assert (compared, found.shape) == ([], (2, 0, len(COSTS)))
