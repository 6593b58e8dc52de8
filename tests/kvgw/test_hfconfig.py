"""KV formats from published models' configs: exact bytes, or a refusal that names the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import transformers

from kvgw.errors import FormatError
from kvgw.hfconfig import AS_MODEL, Deployment, layer_groups
from kvgw.kvformat import LayerGroup
from tests.kvgw import hf_configs as hf
from tests.kvgw.hf_configs import DEPLOYMENT, Config
from tests.kvgw.hf_reading import ONCE, STATES, TWICE, full_bytes, part_bytes, position, read, tensor_parallel

GIB, MIB, KIB = 2**30, 2**20, 2**10


# ---------------------------------------------------------------------- the catalogue's models


def test_M01_llama_3_1_70b_derives_head_dim_and_keeps_the_scaling() -> None:
    kv_format = read(hf.llama_3_1_70b(), replace(DEPLOYMENT, tokens_per_chunk=256))
    assert kv_format.attention == (LayerGroup("mha", 80, kv_heads=8, head_dim=128),)
    assert full_bytes(kv_format) == 327_680
    assert kv_format.chunk_bytes == 80 * MIB
    assert kv_format.run_bytes(2048) == 640 * MIB
    assert kv_format.positions == (
        *("kind", "rope"),
        *("factor", 8.0, "high_freq_factor", 4.0, "low_freq_factor", 1.0, "max_position_embeddings", 131072.0),
        *("original_max_position_embeddings", 8192.0, "theta", 500000.0, "type", "llama3"),
    )


def test_M03_qwen3_30b_takes_the_stated_head_dim_and_ignores_experts() -> None:
    assert full_bytes(read(hf.qwen3_30b_a3b())) == 98_304
    with pytest.raises(FormatError, match="head_dim"):  # 2048 / 32 would be half of it
        read({**hf.qwen3_30b_a3b(), "head_dim": None})


def test_M05_deepseek_v3_keeps_the_latent_and_the_rope_part_once() -> None:
    kv_format = read(hf.deepseek_v3(), replace(DEPLOYMENT, kv_dtype=AS_MODEL))
    assert kv_format.attention == (LayerGroup("mla", 61, latent_dim=512, rope_dim=64),)
    assert kv_format.kv_dtype == "bfloat16", "the weights' fp8 says nothing of the cache"
    assert full_bytes(kv_format) == 70_272
    assert full_bytes(read(hf.deepseek_v3(), replace(DEPLOYMENT, count_mtp_layers=True))) == 71_424


def test_M05_prediction_layers_are_refused_where_there_are_none() -> None:
    with pytest.raises(FormatError, match="num_nextn_predict_layers"):
        read(hf.llama_3_1_70b(), replace(DEPLOYMENT, count_mtp_layers=True))


def test_M07_gemma3_27b_sliding_window() -> None:
    kv_format = read(hf.gemma3_27b(), replace(DEPLOYMENT, kv_dtype=AS_MODEL))
    assert kv_format.attention == (
        LayerGroup("window", 52, kv_heads=16, head_dim=128, window=1024),
        LayerGroup("mha", 10, kv_heads=16, head_dim=128),
    )
    assert full_bytes(kv_format) == 81_920
    assert part_bytes(kv_format, "window", 1) == 425_984
    assert part_bytes(kv_format, "window", 1024) == part_bytes(kv_format, "window", 131_072) == 425_984 * 1024
    assert [round(kv_format.run_bytes(n) / GIB, 3) for n in (8192, 32768, 131072)] == [1.031, 2.906, 10.406]


def test_M07_the_full_layers_are_the_sixth_twelfth_and_so_on() -> None:
    def kinds(first: int, end: int) -> dict[str, int]:
        rank = replace(DEPLOYMENT, parallel=(1, 0, 2, 0, 1, 0), pp_layers=(first, end))
        return {group.kind: group.layers for group in layer_groups(hf.gemma3_27b(), rank)}

    assert kinds(0, 5) == {"window": 5}
    assert kinds(5, 6) == kinds(59, 60) == {"mha": 1}
    assert kinds(60, 62) == {"window": 2}


def test_M09_mistral_7b_window_on_every_layer_or_on_none() -> None:
    first = read(hf.mistral_7b(4096))
    assert first.attention == (LayerGroup("window", 32, kv_heads=8, head_dim=128, window=4096),)
    assert part_bytes(first, "window", 1) == 131_072
    assert first.run_bytes(1_000_000) == 512 * MIB
    later = read(hf.mistral_7b(None))
    assert later.attention == (LayerGroup("mha", 32, kv_heads=8, head_dim=128),)
    assert full_bytes(later) == 131_072


def test_M09_mistral_without_the_field_is_refused_as_its_class_has_a_window() -> None:
    config = hf.mistral_7b(None)
    del config["sliding_window"]
    with pytest.raises(FormatError, match="sliding_window"):
        read(config)


def test_M11_phi_3_5_mini_window_wider_than_the_context_is_full_attention() -> None:
    kv_format = read(hf.phi3_5_mini(), replace(DEPLOYMENT, tokens_per_chunk=256, max_context=131072))
    assert kv_format.attention == (LayerGroup("mha", 32, kv_heads=32, head_dim=96),)
    assert full_bytes(kv_format) == 393_216
    assert kv_format.chunk_bytes == 96 * MIB


def test_M11_longrope_positions_say_which_factors_apply() -> None:
    with pytest.raises(FormatError, match="max_context"):
        read(hf.phi3_5_mini())
    short, long = (read(hf.phi3_5_mini(), replace(DEPLOYMENT, max_context=context)) for context in (4096, 4097))
    assert (position(short, "factors"), position(long, "factors")) == ("short", "long")
    assert position(short, "long_factor") == tuple(float(1 + index) for index in range(48))
    assert position(short, "max_position_embeddings") == 131072.0
    old_name = hf.phi3_5_mini()
    old_name["rope_scaling"] = {**old_name["rope_scaling"], "type": "su"}  # type: ignore[dict-item]
    assert read(old_name, replace(DEPLOYMENT, max_context=4096)) == short


def test_M13_gpt_oss_120b_half_windows() -> None:
    kv_format = read(hf.gpt_oss_120b())
    assert full_bytes(kv_format) == 36_864
    assert part_bytes(kv_format, "window", 128) == 36_864 * 128 == 4.5 * MIB
    assert round(kv_format.run_bytes(131_072) / GIB, 3) == 4.504
    with pytest.raises(FormatError, match="dtype"):
        read(hf.gpt_oss_120b(), replace(DEPLOYMENT, kv_dtype=AS_MODEL))


def test_M15_qwen3_next_recurrent_layers() -> None:
    kv_format = read(hf.qwen3_next_80b(), STATES)
    assert full_bytes(kv_format) == 24_576
    convolutions = 36 * 24_576 * 2
    assert part_bytes(kv_format, "state", 1) == 72 * MIB + convolutions
    assert {group.kind: group.layers for group in kv_format.attention} == {"state": 36, "mha": 12}
    four = read(hf.qwen3_next_80b(), replace(STATES, conv_columns=4))
    assert part_bytes(four, "state", 1) == 72 * MIB + convolutions * 4 // 3


def test_M15_without_a_list_the_layers_four_eight_and_so_on_are_full() -> None:
    def kinds(first: int, end: int) -> dict[str, int]:
        rank = replace(STATES, parallel=(1, 0, 2, 0, 1, 0), pp_layers=(first, end))
        return {group.kind: group.layers for group in layer_groups(hf.qwen3_next_80b(), rank)}

    assert kinds(0, 3) == {"state": 3}
    assert kinds(3, 4) == kinds(47, 48) == {"mha": 1}


def test_M17_jamba_state_type_must_be_stated() -> None:
    kv_format = read(hf.jamba_1_5_mini(), STATES)
    assert full_bytes(kv_format) == 16_384
    assert kv_format.positions == ("kind", "none")
    convolutions = 28 * 8192 * 3 * 2
    assert part_bytes(kv_format, "state", 1) == 14 * MIB + convolutions
    assert part_bytes(read(hf.jamba_1_5_mini(), replace(STATES, state_dtype="bfloat16")), "state", 1) == (
        7 * MIB + convolutions
    )
    for unsaid in ("state_dtype", "conv_dtype", "conv_columns"):
        with pytest.raises(FormatError, match=unsaid):
            read(hf.jamba_1_5_mini(), replace(STATES, **{unsaid: None}))


def test_M17_layers_are_counted_from_0_and_equal_sizes_of_states_are_other_formats() -> None:
    rank = replace(STATES, parallel=(1, 0, 8, 0, 1, 0), pp_layers=(4, 5))
    assert [group.kind for group in layer_groups(hf.jamba_1_5_mini(), rank)] == ["mha"]
    bfloat16, float16 = (
        read(hf.jamba_1_5_mini(), replace(STATES, state_dtype=kind)) for kind in ("bfloat16", "float16")
    )
    assert bfloat16.chunk_bytes == float16.chunk_bytes
    assert bfloat16.canonical() != float16.canonical()


def test_M19_nemotron_3_nano_takes_the_state_type_of_its_config() -> None:
    kv_format = read(hf.nemotron_3_nano(), replace(STATES, state_dtype=None))
    assert full_bytes(kv_format) == 6_144
    assert part_bytes(kv_format, "state", 1) == 46 * MIB + 23 * 18_432 * 2
    assert {group.kind: group.layers for group in kv_format.attention} == {"state": 23, "mha": 6}
    other_key = {**hf.nemotron_3_nano(), "head_dim": None, "attention_head_dim": 128}
    assert read(other_key, STATES).attention == kv_format.attention
    with pytest.raises(FormatError, match="attention_head_dim"):  # 2688 / 32 would be wrong
        read({**hf.nemotron_3_nano(), "head_dim": None}, STATES)


def test_M21_falcon_40b_two_namings_one_answer() -> None:
    old, new = read(hf.falcon_40b_old()), read(hf.falcon_40b_new())
    assert old == new
    assert full_bytes(old) == 122_880
    assert read(hf.falcon_40b_old(), replace(DEPLOYMENT, kv_dtype="float32")).run_bytes(512) == 120 * MIB


def test_M21_multi_query_falcon_has_one_head() -> None:
    old = {
        "model_type": "RefinedWebModel",
        "hidden_size": 4544,
        "n_layer": 32,
        "n_head": 71,
        "multi_query": True,
        "alibi": False,
    }
    assert read(old).attention == (LayerGroup("mha", 32, kv_heads=1, head_dim=64),)
    with pytest.raises(FormatError, match="multi_query"):
        read({**old, "multi_query": None})


def test_M23_gpt2_old_names_learned_positions_and_no_dtype() -> None:
    half = replace(DEPLOYMENT, kv_dtype="float16")
    small, large = read(hf.gpt2(), half), read(hf.gpt2_xl(), half)
    assert (full_bytes(small), full_bytes(large)) == (36_864, 300 * KIB)
    assert full_bytes(read(hf.gpt2(), replace(DEPLOYMENT, kv_dtype="float32"))) == 73_728
    assert small.positions == ("kind", "learned", "length", 1024.0)
    with pytest.raises(FormatError, match="does not say dtype or torch_dtype"):
        read(hf.gpt2(), replace(DEPLOYMENT, kv_dtype=AS_MODEL))


def test_M25_qwen3_vl_reads_the_nested_text_model_and_keeps_mrope() -> None:
    vision = read(hf.qwen3_vl_32b(), replace(DEPLOYMENT, kv_dtype=AS_MODEL))
    assert full_bytes(vision) == 262_144
    assert position(vision, "mrope_section") == (24.0, 20.0, 20.0)
    assert position(vision, "theta") == 5_000_000.0
    text = read(hf.qwen3_32b())
    assert text.attention == vision.attention
    assert text.canonical() != vision.canonical()


def test_M27_kimi_k2_5_nvfp4_has_a_scheme_beside_the_text_model() -> None:
    eight_bits = replace(DEPLOYMENT, kv_dtype="fp8_e4m3", kv_quantisation=AS_MODEL)
    kv_format = read(hf.kimi_k2_5_nvfp4(), eight_bits)
    assert full_bytes(kv_format) == 35_136
    assert kv_format.kv_quantisation == '{"dynamic":false,"num_bits":8,"type":"float"}'
    assert full_bytes(read(hf.kimi_k2_5_nvfp4())) == 70_272
    with pytest.raises(FormatError, match="kv_quantisation is None"):
        read(hf.kimi_k2_5_nvfp4(), replace(eight_bits, kv_quantisation=None))
    with pytest.raises(FormatError, match="kv_dtype"):
        read(hf.kimi_k2_5_nvfp4(), replace(eight_bits, kv_dtype=AS_MODEL))
    with pytest.raises(FormatError, match="kv_cache_scheme"):
        read(hf.llama_3_1_70b(), eight_bits)


def test_M29_nemotron_super_49b_blocks_have_their_own_attention() -> None:
    kv_format = read(hf.nemotron_super_49b())
    assert kv_format.attention == (LayerGroup("mha", 49, kv_heads=8, head_dim=128),)
    assert full_bytes(kv_format) == 200_704
    with pytest.raises(FormatError, match="block_configs"):
        read({**hf.nemotron_super_49b(), "block_configs": None})


def test_M31_gemma4_26b_the_caller_says_whether_keys_that_are_values_are_stored_once() -> None:
    once, twice = read(hf.gemma4_26b_a4b(), ONCE), read(hf.gemma4_26b_a4b(), TWICE)
    assert (full_bytes(once), full_bytes(twice)) == (10_240, 20_480)
    for kv_format in (once, twice):
        assert part_bytes(kv_format, "window", 1) == 204_800
        assert part_bytes(kv_format, "window", 5000) == 200 * MIB
    with pytest.raises(FormatError, match="k_eq_v_stored_once"):
        read(hf.gemma4_26b_a4b())


def test_M33_kimi_k3_reads_both_lists_of_layers() -> None:
    groups = layer_groups(hf.kimi_k3(), STATES)
    latent, state = sorted(groups, key=lambda group: group.kind)
    assert latent == LayerGroup("mla", 24, latent_dim=512, rope_dim=64)
    assert latent.token_bytes(2) == 27_648
    convolutions = 69 * 3 * 96 * 128 * 3 * 2
    assert state.run_bytes(1, 2) == 414 * MIB + convolutions


def test_M33_kimi_k3_fits_a_chunk_only_on_several_ranks() -> None:
    with pytest.raises(FormatError, match="not even one token fits"):
        read(hf.kimi_k3(), STATES)
    rank = read(hf.kimi_k3(), tensor_parallel(STATES, 8))
    assert rank.positions == ("kind", "none")
    assert full_bytes(rank) == 27_648, "each rank keeps the whole latent vectors"
    assert part_bytes(rank, "state", 1) == (414 * MIB + 69 * 3 * 96 * 128 * 3 * 2) // 8


def test_M33_layer_lists_with_a_gap_are_refused() -> None:
    config = hf.kimi_k3()
    lists = config["text_config"]["linear_attn_config"]  # type: ignore[index]
    lists["full_attn_layers"].remove(92)
    with pytest.raises(FormatError, match="full_attn_layers"):
        layer_groups(config, STATES)


# ---------------------------------------------------------------------- R75 capacity planning

PLAN: list[tuple[Callable[[], Config], Deployment, int, int, int, int]] = [
    # config, deployment, bytes per token, bytes per token in a window, window, bytes of states
    (hf.llama_3_1_70b, DEPLOYMENT, 327_680, 0, 0, 0),
    (hf.qwen3_30b_a3b, DEPLOYMENT, 98_304, 0, 0, 0),
    (hf.deepseek_v3, DEPLOYMENT, 70_272, 0, 0, 0),
    (hf.gemma3_27b, DEPLOYMENT, 81_920, 425_984, 1024, 0),
    (lambda: hf.mistral_7b(4096), DEPLOYMENT, 0, 131_072, 4096, 0),
    (lambda: hf.mistral_7b(None), DEPLOYMENT, 131_072, 0, 0, 0),
    (hf.phi3_5_mini, replace(DEPLOYMENT, max_context=131072), 393_216, 0, 0, 0),
    (hf.gpt_oss_120b, DEPLOYMENT, 36_864, 36_864, 128, 0),
    (hf.qwen3_next_80b, STATES, 24_576, 0, 0, 72 * MIB + 36 * 24_576 * 2),
    (hf.jamba_1_5_mini, STATES, 16_384, 0, 0, 14 * MIB + 28 * 24_576 * 2),
    (hf.nemotron_3_nano, STATES, 6_144, 0, 0, 46 * MIB + 23 * 18_432 * 2),
    (hf.falcon_40b_old, DEPLOYMENT, 122_880, 0, 0, 0),
    (hf.falcon_40b_new, DEPLOYMENT, 122_880, 0, 0, 0),
    (hf.gpt2, DEPLOYMENT, 36_864, 0, 0, 0),
    (hf.gpt2_xl, DEPLOYMENT, 307_200, 0, 0, 0),
    (hf.qwen3_vl_32b, DEPLOYMENT, 262_144, 0, 0, 0),
    (hf.kimi_k2_5_nvfp4, DEPLOYMENT, 70_272, 0, 0, 0),
    (hf.nemotron_super_49b, DEPLOYMENT, 200_704, 0, 0, 0),
    (hf.gemma4_26b_a4b, ONCE, 10_240, 204_800, 1024, 0),
    (hf.gemma4_26b_a4b, TWICE, 20_480, 204_800, 1024, 0),
    (hf.kimi_k3, STATES, 27_648, 0, 0, 414 * MIB + 69 * 110_592 * 2),
]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("tokens", [1, 1024, 131_072])
@pytest.mark.parametrize(("config", "deployment", "full", "in_window", "window", "states"), PLAN)
def test_R75_capacity_of_every_model(
    config: Callable[[], Config],
    deployment: Deployment,
    full: int,
    in_window: int,
    window: int,
    states: int,
    tokens: int,
    batch: int,
) -> None:
    needed = batch * sum(group.run_bytes(tokens, 2) for group in layer_groups(config(), deployment))
    assert needed == batch * (tokens * full + min(tokens, window) * in_window + states)


REQUIRED: list[tuple[Callable[[], Config], Deployment, str]] = [
    (hf.llama_3_1_70b, DEPLOYMENT, "num_hidden_layers"),
    (hf.llama_3_1_70b, DEPLOYMENT, "num_attention_heads"),
    (hf.llama_3_1_70b, DEPLOYMENT, "num_key_value_heads"),
    (hf.llama_3_1_70b, DEPLOYMENT, "hidden_size"),
    (hf.llama_3_1_70b, DEPLOYMENT, "model_type"),
    (hf.qwen3_30b_a3b, DEPLOYMENT, "head_dim"),
    (hf.deepseek_v3, DEPLOYMENT, "kv_lora_rank"),
    (hf.deepseek_v3, DEPLOYMENT, "qk_rope_head_dim"),
    (hf.gpt_oss_120b, DEPLOYMENT, "sliding_window"),
    (hf.gpt_oss_120b, DEPLOYMENT, "layer_types"),
    (hf.qwen3_next_80b, STATES, "full_attention_interval"),
    (hf.qwen3_next_80b, STATES, "linear_num_value_heads"),
    (hf.jamba_1_5_mini, STATES, "attn_layer_offset"),
    (hf.jamba_1_5_mini, STATES, "mamba_d_state"),
    (hf.nemotron_3_nano, STATES, "hybrid_override_pattern"),
    (hf.nemotron_3_nano, STATES, "n_groups"),
    (hf.falcon_40b_old, DEPLOYMENT, "n_head_kv"),
    (hf.falcon_40b_new, DEPLOYMENT, "num_kv_heads"),
    (hf.gpt2, DEPLOYMENT, "n_embd"),
]


@pytest.mark.parametrize(("config", "deployment", "field"), REQUIRED)
@pytest.mark.parametrize("how", ["absent", "null"])
def test_R75_a_missing_field_is_named(
    config: Callable[[], Config], deployment: Deployment, field: str, how: str
) -> None:
    incomplete = config()
    if how == "null":
        incomplete[field] = None
    else:
        del incomplete[field]
    with pytest.raises(FormatError, match=field):
        read(incomplete, deployment)


# ---------------------------------------------------------------------- as the transformers library writes them


LOADED = [row[:2] for row in PLAN if row[0]()["model_type"] in transformers.CONFIG_MAPPING]


@pytest.mark.parametrize(("config", "deployment"), LOADED)
def test_a_config_and_what_transformers_makes_of_it_have_one_geometry(
    config: Callable[[], Config], deployment: Deployment
) -> None:
    loaded = transformers.CONFIG_MAPPING[str(config()["model_type"])](**config()).to_dict()
    assert layer_groups(loaded, deployment) == layer_groups(config(), deployment)


@pytest.mark.parametrize("config", [hf.llama_3_1_70b, hf.qwen3_30b_a3b, hf.gemma3_27b, hf.falcon_40b_new, hf.gpt2])
def test_a_config_and_what_transformers_makes_of_it_have_one_position_value(config: Callable[[], Config]) -> None:
    loaded = transformers.CONFIG_MAPPING[str(config()["model_type"])](**config()).to_dict()
    assert read(loaded).positions == read(config()).positions


def test_a_silent_gpt_oss_has_the_scaling_of_its_class() -> None:
    loaded = transformers.CONFIG_MAPPING["gpt_oss"](**hf.gpt_oss_120b(), max_position_embeddings=131072).to_dict()
    silent = {**hf.gpt_oss_120b(), "max_position_embeddings": 131072}
    assert read(silent).positions == read(loaded).positions
    plain = {**silent, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}
    assert read(plain).positions == ("kind", "rope", "theta", 150000.0)
