"""Engine profiles: built in, from files, from data sheets, and fitted to recorded runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.timing import LinearTiming, MockerTiming, RooflineTiming, StepWork
from forebay.runtime.errors import ConfigError
from forebay.simulate.profiles.fitting import (
    COSTS,
    REQUESTS_MIN,
    EngineRun,
    FitImpossible,
    TimedRequest,
    amounts,
    fit,
)
from forebay.simulate.profiles.profile import EngineSizes, Profile, load_profile, write_linear
from forebay.simulate.profiles.sheets import Transformer, gpu_sheet, read_transformer
from tests.simulate.engine_runs import TRUTH, WORK_US, Jittered, ModelledRun, engine_run, spec, with_observed_times

# As published for Llama-3.1-8B and Mixtral-8x7B.
LLAMA_8B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MIXTRAL = {**LLAMA_8B, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
LAYER = 2 * 4096 * (32 + 8) * 128 + 3 * 4096 * 14336 + 2 * 4096  # 218,112,000
HEAD = 4096 * 128256
DECODE_ONE = {"prefill_tokens": 0, "prefill_attended": 0, "decode_sequences": 1, "cache_tokens": 1 << 20}


def profile_file(folder: Path, text: str, config: dict[str, Any] | None = None) -> str:
    (folder / "config.json").write_text(json.dumps(config or LLAMA_8B))
    path = folder / "engine.toml"
    path.write_text(text)
    return str(path)


def described(folder: Path, config: dict[str, Any]) -> Transformer:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return read_transformer(path)


def roofline_of(folder: Path, text: str = "", config: dict[str, Any] | None = None) -> Profile:
    described = f'kind = "roofline"\nmodel = "config.json"\n{text}'
    return load_profile(
        profile_file(folder, described if "gpu =" in text else f'{described}\ngpu = "h100-sxm"', config)
    )


def timing_of(profile: Profile) -> RooflineTiming:
    assert isinstance(profile.timing, RooflineTiming)
    return profile.timing


def test_the_mocker_is_built_in() -> None:
    profile = load_profile("mocker")
    assert profile == Profile(timing=MockerTiming(), sizes=EngineSizes(), name="mocker")


def test_a_file_can_change_the_sizes_of_the_mocker(tmp_path: Path) -> None:
    path = profile_file(tmp_path, 'kind = "mocker"\n[sizes]\nkv_blocks = 512\ngpus = 2')
    profile = load_profile(path)
    assert profile == Profile(timing=MockerTiming(), sizes=EngineSizes(kv_blocks=512, gpus=2.0), name="engine")


def test_a_linear_profile_round_trips(tmp_path: Path) -> None:
    made = Profile(
        timing=LinearTiming(step=1200.5, attended_pair=1e-05, decode_sequence=3.0),
        sizes=EngineSizes(block_size=16, kv_blocks=4096, max_num_seqs=8, max_num_batched_tokens=2048),
        name='eight "cores"',
        source="run.rec\\",
        work_us=750,
    )
    text = write_linear(made, "fitted\n\nto something")
    assert text.startswith("# fitted\n#\n# to something\n")
    path = tmp_path / "fitted.toml"
    path.write_text(text)
    assert load_profile(str(path)) == made


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "kind: must be one of mocker, linear, roofline"),
        ('kind = "cubic"', "kind: must be one of mocker, linear, roofline"),
        ("kind = ", "Invalid value"),
        ('kind = "linear"', "costs_us: missing key"),
        ('kind = "linear"\n[costs_us]\nstep = -1', "costs_us: step must be a number from 0 on, not -1"),
        ('kind = "linear"\n[costs_us]\nstep = inf', "costs_us.step: must be a finite number, got inf"),
        ('kind = "linear"\n[costs_us]\nstep = 0', "at least one cost must be above 0"),
        ('kind = "linear"\n[costs_us]\nstop = 1', "costs_us: unknown key 'stop'; did you mean step?"),
        ('kind = "mocker"\n[sizes]\nkv_blocks = 0', "sizes.kv_blocks: must be a whole number from 1"),
        ('kind = "mocker"\n[sizes]\ngpus = inf', "sizes.gpus: must be a finite number, got inf"),
        ("kind = " + "[" * 5_000, "not TOML: maximum recursion depth exceeded"),
        ('kind = "mocker"\n[sizes]\ngpus = 0', "sizes.gpus: must be a number above 0 and at most 1000000"),
        ('kind = "roofline"\nmodel = "c.json"\ngpu = "h100-sxm"', "c.json: No such file"),
        ('kind = "roofline"\nmodel = "config.json"\ngpu = "H100"', "unknown GPU 'H100'; did you mean h100-sxm?"),
        ('kind = "roofline"\nmodel = "config.json"\ngpu = "mi3"', "unknown GPU 'mi3'; GPUs are: a100-80gb, b200, "),
        (
            'kind = "roofline"\nmodel = "config.json"\ngpu = "h100-sxm"\ntensor_parallel = 5',
            "tensor_parallel = 5 does not divide 32 attention heads",
        ),
        (
            'kind = "roofline"\nmodel = "config.json"\ngpu = "a100-80gb"\nweights = "fp8"',
            "the GPU does not support fp8",
        ),
        (
            'kind = "roofline"\nmodel = "config.json"\ngpu = "h100-sxm"\n[assumed]\nmemory = 1.5',
            "assumed.memory: must be a number above 0 and at most 1",
        ),
    ],
)
def test_error_of_an_invalid_profile_names_the_key_and_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = profile_file(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load_profile(path)
    assert reason in str(refused.value)
    assert str(refused.value).startswith(path)


FIELDS = ("kind", "name", "sizes", "costs_us", "model", "gpu", "tensor_parallel", "weights", "assumed", "work_us")
VALUES = (
    "'linear'", "'mocker'", "'roofline'", "'config.json'", "'h200'", "1", "-1", "nan", "'fp8'", "[]", "{step = 1}",
    "{kv_blocks = 9}", "{block_size = 0}", "{memory = 0.5}", "{bf16_tflops = 1}", "99999999999999999999",
)  # fmt: skip


@given(lines=st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(VALUES)), noise=st.text(max_size=20))
def test_any_file_is_a_profile_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, lines: dict[str, str], noise: str
) -> None:
    for text in ("\n".join(f"{field} = {value}" for field, value in lines.items()), noise):
        path = profile_file(tmp_path_factory.getbasetemp(), text)
        try:
            profile = load_profile(path)
        except ConfigError as error:
            assert str(error).startswith(path)
        else:
            work = {"prefill_tokens": 1, "prefill_attended": 1, "decode_sequences": 1, "decode_tokens": 64}
            assert profile.timing.step_us(StepWork(**work, cache_tokens=64)) >= 1


@pytest.mark.parametrize(
    ("name", "more"),
    [("h900", ""), ("h100", '. For the GPU h100-sxm write a profile with kind = "roofline" .*: see docs/simulate.md')],
)
def test_a_missing_profile_is_rejected(name: str, more: str) -> None:
    reason = f"unknown engine profile '{name}'; use 'mocker' or the path of a profile file{more}$"
    with pytest.raises(ConfigError, match=reason):
        load_profile(name)


def test_a_large_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        load_profile(profile_file(tmp_path, "#" * (1 << 21)))


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(LLAMA_8B, 8_030_261_248), (MIXTRAL, 46_702_792_704), ({**LLAMA_8B, "tie_word_embeddings": True}, 7_504_924_672)],
)
def test_parameter_counts_match_the_published_ones(tmp_path: Path, config: dict[str, Any], parameters: int) -> None:
    assert described(tmp_path, config).parameters == parameters


def test_the_text_part_of_a_vision_model_is_used(tmp_path: Path) -> None:
    assert described(tmp_path, {"model_type": "mllama", "text_config": LLAMA_8B}).parameters == 8_030_261_248


def test_every_layer_includes_shared_experts_and_a_router(tmp_path: Path) -> None:
    mixture = {
        **LLAMA_8B,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        "head_dim": 64,
    }
    model = described(tmp_path, mixture)
    attention = 2 * 4096 * (32 + 8) * 64
    assert model.layer == attention + 4096 * 64 + 3 * 4096 * 1024 + 2 * 4096
    assert (model.expert, model.experts, model.experts_active) == (3 * 4096 * 512, 64, 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"first_k_dense_replace": 1, "num_experts": 8}, "a mix of layers with and without experts"),
        ({"hidden_size": None}, "missing key hidden_size"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer, not True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"num_key_value_heads": 5}, "num_attention_heads (32) is not a multiple of num_key_value_heads (5)"),
        ({"hidden_act": "sine"}, "hidden_act: unknown activation 'sine'"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok (5) exceeds the number of experts (4)"),
        ({"num_experts": 4, "intermediate_size": 0}, "needs moe_intermediate_size or intermediate_size"),
    ],
)
def test_an_incomplete_model_description_is_rejected(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        described(tmp_path, {**LLAMA_8B, **changes})
    assert reason in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path / "config.json"))


def test_a_malformed_model_description_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, reason in (("[]", "got `array`"), ('{"a":' * 5_000, "recursion"), ('{"\xff":1}', "utf-8")):
        path.write_bytes(text.encode("latin1"))
        with pytest.raises(ConfigError, match=reason):
            read_transformer(path)
    path.unlink()
    with pytest.raises(ConfigError, match=rf"^{path}: No such file"):
        read_transformer(path)


def test_an_ungated_mlp_has_two_matrices(tmp_path: Path) -> None:
    assert described(tmp_path, {**LLAMA_8B, "hidden_act": "gelu"}).layer == LAYER - 4096 * 14336


def test_llama_8b_on_one_h100(tmp_path: Path) -> None:
    profile = roofline_of(tmp_path)
    timing = timing_of(profile)
    # Decoding one sequence of 640 tokens reads weights and cache: 2 bytes per number, 80 % of 3.35 TB/s.
    read = 2 * (32 * LAYER + HEAD) + 640 * 2 * 32 * 8 * 128 * 2
    assert timing.step_us(StepWork(**DECODE_ONE, decode_tokens=640)) == round(read / (3.35e6 * 0.8) + 500)
    assert read / (3.35e6 * 0.8) == pytest.approx(5632, abs=1)
    # Prefill of 2048 tokens: 70 % of 989 TFLOPS; a pair takes 4 FLOPs per number of 32 heads of 128.
    pairs = 2048 * 2049 // 2
    flops = 2048 * 2 * 32 * LAYER + pairs * 4 * 32 * 32 * 128
    took = timing.step_us(StepWork(2048, pairs, 0, 0, cache_tokens=1))
    assert took == round(flops / (989e6 * 0.7) + 500)
    # 90 % of 79 GiB less 2 GiB reserved and less the weights; 131,072 bytes of cache per token.
    left = 79 * 2**30 * 0.9 - 2 * 2**30 - 2 * 8_030_261_248
    assert profile.sizes == EngineSizes(block_size=64, kv_blocks=int(left // (131_072 * 64)), gpus=1.0)
    assert profile.source == gpu_sheet("h100-sxm").source


def test_tensor_parallelism_splits_work_and_adds_reductions(tmp_path: Path) -> None:
    one, two = timing_of(roofline_of(tmp_path)), timing_of(roofline_of(tmp_path, "tensor_parallel = 2"))
    for half in ("flops_token", "flops_sampled", "flops_pair", "bytes_weights", "bytes_kv_token"):
        assert getattr(two, half) == getattr(one, half) / 2
    # Two all-reduces per layer of 4096 numbers of 2 bytes. A ring of two sends each number once at 70 % of 450 GB/s.
    assert two.reduce_us == 64 * 8.0
    assert two.reduce_us_token == pytest.approx(64 * 4096 * 2 / 315e3)
    assert (one.reduce_us, one.reduce_us_token) == (0.0, 0.0)
    assert roofline_of(tmp_path, "tensor_parallel = 2").sizes.gpus == 2.0


def test_a_kv_head_that_cannot_be_split_is_replicated(tmp_path: Path) -> None:
    eight, sixteen = (timing_of(roofline_of(tmp_path, f"tensor_parallel = {gpus}")) for gpus in (8, 16))
    assert eight.bytes_kv_token == sixteen.bytes_kv_token == 2 * 32 * 128 * 2


def test_quantised_weights_use_fewer_bytes(tmp_path: Path) -> None:
    wide = timing_of(roofline_of(tmp_path))
    fp8 = timing_of(roofline_of(tmp_path, 'weights = "fp8"\nkv_cache = "fp8"'))
    assert (fp8.bytes_weights, fp8.bytes_kv_token) == (wide.bytes_weights / 2, wide.bytes_kv_token / 2)
    assert fp8.flops_us == pytest.approx(1979e6 * 0.7)
    int4 = timing_of(roofline_of(tmp_path, 'weights = "int4"'))
    assert (int4.bytes_weights, int4.flops_us) == (wide.bytes_weights / 4, wide.flops_us)
    quantized = {**LLAMA_8B, "quantization_config": {"quant_method": "fp8"}}
    assert timing_of(roofline_of(tmp_path, config=quantized)).bytes_weights == fp8.bytes_weights


def test_mixture_reads_selected_experts_and_computes_active_ones(tmp_path: Path) -> None:
    profile = roofline_of(tmp_path, "tensor_parallel = 2", MIXTRAL)
    timing = timing_of(profile)
    expert = 3 * 4096 * 14336
    layer = LAYER - expert + 4096 * 8
    assert timing.flops_token == 32 * (layer + 2 * expert)
    assert (timing.bytes_experts, timing.experts, timing.experts_active) == (32 * 8 * expert, 8, 2)
    read = 32 * layer + 4096 * 32000 + 32 * 2 * expert + 64 * 2 * 32 * 4 * 128 * 2
    took = timing.step_us(StepWork(**DECODE_ONE, decode_tokens=64))
    assert took == pytest.approx(read / (3.35e6 * 0.8) + 500 + 64 * 8 + timing.reduce_us_token, abs=1)


def test_a_model_that_exceeds_gpu_memory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the weights take 87.0 GiB on each of 1 GPUs, but 69.1 GiB"):
        roofline_of(tmp_path, config=MIXTRAL)


def test_a_custom_data_sheet_and_assumptions_are_used(tmp_path: Path) -> None:
    own = """
    [gpu]
    bf16_tflops = 100
    memory_gib = 24
    memory_tb_s = 1
    link_gb_s = 10
    [assumed]
    memory = 1
    overhead_us = 0
    [sizes]
    block_size = 16
    kv_blocks = 1000
    """
    profile = roofline_of(tmp_path, own.replace("[gpu]", "[gpu] # gpu ="))
    assert timing_of(profile).step_us(StepWork(**DECODE_ONE, decode_tokens=0)) == round(2 * (32 * LAYER + HEAD) / 1e6)
    assert profile.sizes == EngineSizes(block_size=16, kv_blocks=1000, gpus=1.0)


# Profiles of recorded runs


STEP, TOKENS, PAIRS, DECODES, SEQUENCES, CONTEXT = range(len(COSTS))
SMALL = spec(kv_blocks_total=1000, max_num_seqs=8, max_num_batched_tokens=100)


def test_costs_of_runs_are_recovered() -> None:
    found = fit([engine_run(1), engine_run(2)])
    timing = found.timing
    for name in ("prefill_token", "attended_pair", "decode_sequence", "context_token"):
        assert getattr(timing, name) == pytest.approx(getattr(TRUTH, name), rel=0.06), name
    # Steps without decoding are the only ones that separate the fixed cost of a step from the cost of decoding.
    assert timing.step + timing.decode_step == pytest.approx(TRUTH.step + TRUTH.decode_step, rel=0.02)
    assert timing.step + found.work_us == pytest.approx(TRUTH.step + WORK_US, rel=0.06)
    assert found.errors["TTFT"][0] < 0.06
    assert found.errors["ITL"][0] < 0.02
    assert (found.fitted, found.warnings) == (280, [])


def test_jittered_steps_are_fitted() -> None:
    found = fit([engine_run(seed, timing=Jittered(TRUTH, 0.3, seed)) for seed in (3, 4)])
    assert found.timing.prefill_token == pytest.approx(TRUTH.prefill_token, rel=0.2)
    assert found.errors["TTFT"][0] < 0.2


def test_a_fit_predicts_a_busier_workload() -> None:
    """A profile has to predict workloads other than the one it was fitted to."""
    found = fit([engine_run(5, every_us=600_000)])
    other = engine_run(6, every_us=250_000)
    relative = sorted(
        abs(done.ttft_us / (one.first_us - one.routed_us) - 1)
        for one, done in ModelledRun(other, found.timing, found.work_us)
    )
    assert relative[len(relative) // 2] < 0.1


def test_isolated_requests_determine_only_sums() -> None:
    found = fit([engine_run(7, requests=60, every_us=60_000_000)])
    assert any("no two requests decoded together" in warning for warning in found.warnings)
    (inseparable,) = [warning for warning in found.warnings if "only the sum" in warning and "decode_step" in warning]
    assert "decode_sequence" in inseparable
    assert found.errors["TTFT"][1] < 0.02
    timing = found.timing
    together = timing.step + timing.decode_step + timing.decode_sequence
    assert together == pytest.approx(TRUTH.step + TRUTH.decode_step + TRUTH.decode_sequence, rel=0.02)


def test_single_token_responses_have_no_itl() -> None:
    run = engine_run(8, requests=40)
    for one in run.requests:
        one.output_tokens = 1
    found = fit([with_observed_times(run)])
    assert set(found.errors) == {"TTFT"}
    assert "no recorded time depends on decode_step" in found.warnings
    assert found.timing.prefill_token == pytest.approx(TRUTH.prefill_token, rel=0.05)


def test_too_few_requests_are_not_fitted() -> None:
    run = engine_run(9, requests=REQUESTS_MIN)
    run.requests[3].left_out = "for a reason"
    with pytest.raises(FitImpossible, match="only 19 requests can be compared; at least 20 are needed"):
        fit([run])


def test_left_out_requests_still_load_the_engine() -> None:
    run = engine_run(10, requests=100)
    for one in run.requests[::10]:
        one.left_out = "for a reason"
    found = fit([run])
    assert found.fitted == 63
    assert found.errors["TTFT"][0] < 0.05


def request(routed: int, prompt: int, outputs: int, first: int, last: int, cached: int = 0) -> TimedRequest:
    return TimedRequest(routed, prompt, outputs, cached, first, last)


def run(*requests: TimedRequest) -> EngineRun:
    return EngineRun(SMALL, list(requests))


def test_a_lone_request_gives_the_amounts_of_its_work() -> None:
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


def test_a_run_without_requests() -> None:
    compared, found = amounts(run(TimedRequest(0, 20, 100)))
    assert (compared, found.shape) == ([], (2, 0, len(COSTS)))
