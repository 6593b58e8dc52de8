"""Rules by which a config becomes a KV format: positions, ranks, windows, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgw.errors import FormatError
from kvgw.hfconfig import AS_MODEL
from kvgw.kvformat import KVFormat, LayerGroup
from tests.kvgw import hf_configs as hf
from tests.kvgw.hf_configs import DEPLOYMENT, Config
from tests.kvgw.hf_reading import STATES, part_bytes, position, read, tensor_parallel

# ---------------------------------------------------------------------- positions


def test_positions_are_the_same_in_old_and_new_configs() -> None:
    old = hf.llama_3_1_70b()
    scaling = old.pop("rope_scaling")
    assert isinstance(scaling, dict)
    new = {**old, "rope_theta": None, "rope_parameters": {"rope_theta": 500000, **scaling}}
    legacy_type = {"type": scaling["rope_type"], **{name: scaling[name] for name in scaling if name != "rope_type"}}
    forms = {read(config).canonical() for config in (hf.llama_3_1_70b(), new, {**old, "rope_scaling": legacy_type})}
    assert len(forms) == 1


def test_positions_of_a_plain_rope_are_as_on_the_format_page() -> None:
    for config in (
        {**hf.qwen3_30b_a3b(), "rope_theta": 100000},
        {**hf.qwen3_30b_a3b(), "rope_theta": 100000.0, "rope_scaling": None},
        {**hf.qwen3_30b_a3b(), "rope_parameters": {"rope_type": "default", "rope_theta": 100000}},
    ):
        kv_format = read(config)
        assert kv_format.positions == ("kind", "rope", "theta", 100000.0)
        assert type(kv_format.positions[3]) is float, "an integer would have another canonical form"
    assert read(hf.qwen3_30b_a3b()).positions == ("kind", "rope", "theta", 10000.0)


def test_positions_by_layer_are_the_same_in_old_and_new_configs() -> None:
    old = hf.gemma3_27b()
    text = old["text_config"]
    assert isinstance(text, dict)
    scaling = {"factor": 8.0, "rope_type": "linear"}
    new_text = {
        **text,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000.0, **scaling},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }
    old_text = {**text, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": scaling}
    expected = (
        *("kind", "rope", "full_attention.factor", 8.0, "full_attention.theta", 1000000.0),
        *("full_attention.type", "linear", "sliding_attention.theta", 10000.0),
    )
    assert read({**old, "text_config": new_text}).positions == expected
    assert read({**old, "text_config": old_text}).positions == expected


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 500001.0},
        {"partial_rotary_factor": 0.5},
        {"rotary_dim": 64},
        {"rope_interleave": True},
        {"max_position_embeddings": 65536},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32}},
        {"rope_scaling": {"rope_type": "kind of the future", "some": ["thing", {"else"}.pop(), True, 3]}},
    ],
)
def test_everything_about_rope_enters_the_positions(change: Config) -> None:
    assert read({**hf.llama_3_1_70b(), **change}).canonical() != read(hf.llama_3_1_70b()).canonical()


def test_positions_of_a_dynamic_rope_hold_the_context() -> None:
    config = {**hf.llama_3_1_70b(), "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(FormatError, match="max_context"):
        read(config)
    assert position(read(config, replace(DEPLOYMENT, max_context=9000)), "max_context") == 9000.0


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_theta": 1.0}},  # beside another rope_theta
        {"rope_theta": math.nan},
        {"rope_theta": math.inf},
        {"rope_theta": 10**400},
        {"rope_scaling": {"rope_type": 7}},
        {"rope_scaling": {"rope_type": "mrope", "type": "yarn", "mrope_section": [1]}},
        {"rope_scaling": {"rope_type": "mrope"}},
        {"rope_scaling": {"rope_type": "yarn", "a.b": 1}},
        {"rope_scaling": {"rope_type": "yarn", "a.b": {}}},
        {"rope_scaling": {"rope_type": "yarn", "max_position_embeddings": 1}},  # beside another
        {"rope_scaling": {"rope_type": "yarn", 3: 1}},
        {"rope_scaling": {"rope_type": "yarn", "bytes": b"1"}},
        {"rope_scaling": {"rope_type": "yarn", "deep": [[[[1]]]]}},
        {"rope_scaling": {"rope_type": "yarn", "deep": {"a": {"b": {"c": {"d": {}}}}}}},
        {"rope_scaling": {"rope_type": "yarn", "e\u0301": 1}},  # not NFC
        {"rope_scaling": {"rope_type": "yarn\ud800"}},
        {"rope_scaling": [1]},
    ],
)
def test_positions_that_contradict_themselves_or_cannot_be_encoded_are_refused(change: Config) -> None:
    with pytest.raises(FormatError):
        read({**hf.llama_3_1_70b(), **change})


# ---------------------------------------------------------------------- parallel


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (64, 1)])
def test_tensor_parallel_divides_or_repeats_kv_heads(size: int, kv_heads: int) -> None:
    (group,) = read(hf.llama_3_1_70b(), tensor_parallel(DEPLOYMENT, size)).attention
    assert group.kv_heads == kv_heads


def test_tensor_parallel_sizes_that_do_not_divide_are_refused() -> None:
    third = tensor_parallel(STATES, 3)
    with pytest.raises(FormatError, match="8 KV heads neither divide among nor repeat evenly over tp_size 3"):
        read(hf.llama_3_1_70b(), tensor_parallel(DEPLOYMENT, 3))
    with pytest.raises(FormatError, match="does not divide among tp_size 3"):
        read({**hf.jamba_1_5_mini(), "num_key_value_heads": 3, "num_attention_heads": 33, "head_dim": 128}, third)


def test_tensor_parallel_states_are_an_equal_part() -> None:
    for config in (hf.qwen3_next_80b(), hf.jamba_1_5_mini(), hf.nemotron_3_nano()):
        whole, half = read(config, STATES), read(config, tensor_parallel(STATES, 2))
        assert part_bytes(half, "state", 1) * 2 == part_bytes(whole, "state", 1)


def test_pipeline_ranks_state_their_layers_which_are_part_of_the_format() -> None:
    parts = [(0, 16), (16, 32), (15, 31)]
    ranks = [replace(DEPLOYMENT, parallel=(1, 0, 2, 1, 1, 0), pp_layers=part) for part in parts]
    formats = [read(hf.mistral_7b(None), rank) for rank in ranks]
    assert {kv_format.attention for kv_format in formats} == {(LayerGroup("mha", 16, kv_heads=8, head_dim=128),)}
    assert len({kv_format.canonical() for kv_format in formats}) == 3


@pytest.mark.parametrize("part", [(0, 0), (5, 4), (0, 33), (-1, 3), (0, 1.0), (True, 2), (1,), "ab"])
def test_pipeline_layers_outside_the_model_are_refused(part: tuple[int, int]) -> None:
    with pytest.raises(FormatError, match="pp_layers"):
        read(hf.mistral_7b(None), replace(DEPLOYMENT, parallel=(1, 0, 2, 1, 1, 0), pp_layers=part))


@pytest.mark.parametrize(
    "change",
    [
        {"parallel": (1, 0, 2, 0, 1, 0)},
        {"pp_layers": (0, 1)},
        {"parallel": (1, 0, 1, 0, 2, 0)},
        {"parallel": (0, 0, 1, 0, 1, 0)},
        {"parallel": (1, 0, 1)},
        {"max_context": 0},
        {"max_context": True},
        {"conv_columns": "3"},
        {"k_eq_v_stored_once": 1},
        {"count_mtp_layers": None},
    ],
)
def test_deployments_that_make_no_sense_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(FormatError, match="|".join({**change, "cp_size": 2, "pp_layers": None})):
        replace(DEPLOYMENT, **change)


# ---------------------------------------------------------------------- windows, types, unknown and hostile


def test_window_and_context() -> None:
    def kind(context: int | None) -> str:
        return read(hf.mistral_7b(4096), replace(DEPLOYMENT, max_context=context)).attention[0].kind

    assert [kind(None), kind(4097), kind(4096), kind(2048)] == ["window", "window", "mha", "mha"]


def test_qwen_window_counts_only_when_used_and_from_its_first_layer_on() -> None:
    qwen = {**hf.qwen3_32b(), "sliding_window": 4096, "max_window_layers": 60, "use_sliding_window": False}
    assert [group.kind for group in read(qwen).attention] == ["mha"]
    used = read({**qwen, "use_sliding_window": True})
    assert {group.kind: group.layers for group in used.attention} == {"mha": 60, "window": 4}


def test_layers_that_share_a_cache_keep_none() -> None:
    gemma = {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "sliding_window": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
    }
    assert {group.kind: group.layers for group in read(gemma).attention} == {"window": 4, "mha": 1}
    with pytest.raises(FormatError, match="num_kv_shared_layers"):
        read({**gemma, "num_kv_shared_layers": 10})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["full_attention"] * 79}, "79 layers"),
        ({"layer_types": ["strange_attention"] * 80}, "strange_attention"),
        ({"layer_types": ["linear_attention"] * 80}, "recurrent state"),
        ({"layer_types": ["chunked_attention"] * 80, "attention_chunk_size": 8192}, "max_context"),
        ({"layer_types": "full"}, "layer_types"),
        ({"layer_types": [1] * 80}, "layer_types"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"num_key_value_heads": 7}, "7 KV heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads"),
        ({"num_key_value_heads": 8.0}, "num_key_value_heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"num_hidden_layers": 2**32 - 1}, "claims 4294967295 layers"),
        ({"n_layer": 79}, "contradicts itself"),
        ({"hidden_size": 8191}, "hidden size 8191"),
        ({"head_dim": [128]}, "head_dim"),
        ({"text_config": []}, "text_config"),
        ({"model_type": 3}, "model_type"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"torch_dtype": "auto"}, "dtype"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype"),
        ({"torch_dtype": 16}, "torch_dtype"),
        ({"dtype": "float16"}, "contradicts itself"),
    ],
)
def test_wrong_and_contradicting_fields_are_refused_by_name(change: Config, named: str) -> None:
    with pytest.raises(FormatError, match=named):
        read({**hf.llama_3_1_70b(), **change}, replace(DEPLOYMENT, kv_dtype=AS_MODEL))


def test_element_types_that_differ_inside_and_outside_are_refused() -> None:
    config = {**hf.qwen3_vl_32b(), "dtype": "float32"}
    with pytest.raises(FormatError, match="two element types"):
        read(config, replace(DEPLOYMENT, kv_dtype=AS_MODEL))
    assert read({**config, "dtype": "torch.bfloat16"}, replace(DEPLOYMENT, kv_dtype=AS_MODEL)).kv_dtype == "bfloat16"
    with pytest.raises(FormatError, match="AS_MODEL"):
        read(config, replace(DEPLOYMENT, kv_dtype="auto"))


def test_unknown_model_types_are_read_only_when_unmistakable() -> None:
    plain = {
        "model_type": "of-the-future",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "head_dim": 64,
        "rope_theta": 10000.0,
        "n_shared_experts": 1,
        "add_cross_attention": False,
    }
    assert read(plain).attention == (LayerGroup("mha", 4, kv_heads=2, head_dim=64),)
    for field in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta"):
        with pytest.raises(FormatError, match=field):
            read({name: value for name, value in plain.items() if name != field})
    for hint in (
        "kv_lora_rank",
        "sliding_window",
        "mamba_d_state",
        "attn_layer_period",
        "num_kv_shared_layers",
        "v_head_dim",
    ):
        with pytest.raises(FormatError, match=f"of-the-future.*{hint}"):
            read({**plain, hint: 2})


def test_models_with_an_indexer_of_their_own_are_refused() -> None:
    with pytest.raises(FormatError, match="index_head_dim"):
        read({**hf.deepseek_v3(), "index_head_dim": 128})


def test_extra_pairs_of_the_caller_stay_and_cannot_shadow_the_derived() -> None:
    kv_format = read(hf.jamba_1_5_mini(), replace(STATES, extra=(("a", 1), ("z", None))))
    assert [name for name, _ in kv_format.extra] == ["a", "conv_columns", "conv_dtype", "state_dtype", "z"]
    with pytest.raises(FormatError, match="unique"):
        read(hf.jamba_1_5_mini(), replace(STATES, extra=(("state_dtype", "float32"),)))


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([2**31, 2**32 - 1, 2**64]),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.lists(st.integers(-1, 5), max_size=4),
    st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), st.integers(), max_size=3),
)


@given(st.data())
def test_hostile_values_give_a_format_or_a_format_error(data: st.DataObject) -> None:
    config = data.draw(st.sampled_from(hf.ALL))()
    target = config
    text = config.get("text_config")
    if isinstance(text, dict) and data.draw(st.booleans()):
        target = text
    target[data.draw(st.sampled_from([*target, "rope_scaling", "quantization_config", "dtype"]))] = data.draw(JUNK)
    stated = replace(STATES, k_eq_v_stored_once=True, max_context=8192, kv_dtype=AS_MODEL)
    try:
        kv_format = read(config, stated)
    except FormatError as error:
        assert str(error)
    else:
        assert KVFormat.from_canonical(kv_format.canonical()) == kv_format
