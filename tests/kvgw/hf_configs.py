"""Configs of published models as plain dicts: the fields that decide their KV cache, and the decoys beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from kvgw.hfconfig import Deployment

Config: TypeAlias = dict[str, object]

DEPLOYMENT = Deployment(
    model="example/model",
    weights="0123456789abcdef0123456789abcdef01234567",
    tokenizer="0123456789abcdef0123456789abcdef01234567",
    kv_dtype="bfloat16",
    kv_quantisation=None,
    adapter=None,
    adapter_digest=None,
    layout="layer,kv,token,head,dim",
    tokens_per_chunk=16,
    engine="example",
    engine_abi="1",
    parallel=(1, 0, 1, 0, 1, 0),
    multimodal=None,
    extra=(),
)
"""One rank, bfloat16, and nothing stated that only some models need."""


def llama_3_1_70b() -> Config:
    return {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def qwen3_30b_a3b() -> Config:
    return {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "torch_dtype": "bfloat16",
    }


def deepseek_v3() -> Config:
    return {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"},
        "torch_dtype": "bfloat16",
    }


def gemma3_27b() -> Config:
    return {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 5376,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
        },
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27, "num_attention_heads": 16},
        "torch_dtype": "bfloat16",
    }


def mistral_7b(sliding_window: int | None) -> Config:
    return {
        "model_type": "mistral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": sliding_window,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
    }


def phi3_5_mini() -> Config:
    return {
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 262144,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + index / 48 for index in range(48)],
            "long_factor": [1.0 + index for index in range(48)],
        },
        "torch_dtype": "bfloat16",
    }


def gpt_oss_120b() -> Config:
    return {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "sliding_window": 128,
    }


def qwen3_next_80b() -> Config:
    return {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "torch_dtype": "bfloat16",
    }


def jamba_1_5_mini() -> Config:
    return {
        "model_type": "jamba",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 256,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    }


def nemotron_3_nano() -> Config:
    return {
        "model_type": "nemotron_h",
        "hidden_size": 2688,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "mamba_ssm_cache_dtype": "float32",
        "torch_dtype": "bfloat16",
    }


def falcon_40b_old() -> Config:
    return {
        "model_type": "RefinedWeb",
        "hidden_size": 8192,
        "n_layer": 60,
        "n_head": 128,
        "n_head_kv": 8,
        "alibi": False,
        "torch_dtype": "bfloat16",
    }


def falcon_40b_new() -> Config:
    return {
        "model_type": "falcon",
        "hidden_size": 8192,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
        "alibi": False,
        "torch_dtype": "bfloat16",
    }


def gpt2() -> Config:
    return {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}


def gpt2_xl() -> Config:
    return {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024}


def qwen3_vl_32b() -> Config:
    return {
        "model_type": "qwen3_vl",
        "text_config": {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "dtype": "bfloat16",
        },
        "vision_config": {"depth": 27, "num_heads": 16, "hidden_size": 1152},
    }


def qwen3_32b() -> Config:
    return {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5000000,
        "torch_dtype": "bfloat16",
    }


def kimi_k2_5_nvfp4() -> Config:
    return {
        "model_type": "kimi_k25",
        "text_config": {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "rope_theta": 50000.0,
            "torch_dtype": "bfloat16",
        },
        "quantization_config": {
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        },
    }


def nemotron_super_49b() -> Config:
    attends = {"attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False, "sparsify": None}}
    skips = {"attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False, "sparsify": None}}
    return {
        "model_type": "nemotron-nas",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": None,
        "block_configs": [skips if index % 5 in (2, 4) and index != 79 else attends for index in range(80)],
        "torch_dtype": "bfloat16",
    }


def gemma4_26b_a4b() -> Config:
    return {
        "model_type": "gemma4",
        "text_config": {
            "num_hidden_layers": 30,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "num_global_key_value_heads": 2,
            "global_head_dim": 512,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "sliding_window": 1024,
            "dtype": "bfloat16",
        },
    }


def kimi_k3() -> Config:
    full = [*range(4, 93, 4), 93]
    return {
        "model_type": "kimi_k3",
        "text_config": {
            "model_type": "kimi_linear",
            "num_hidden_layers": 93,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "mla_use_nope": True,
            "num_attention_heads": 96,
            "num_key_value_heads": 96,
            "linear_attn_config": {
                "full_attn_layers": full,
                "kda_layers": [number for number in range(1, 94) if number not in full],
                "num_heads": 96,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        },
        "dtype": "bfloat16",
    }


ALL: Final[tuple[Callable[[], Config], ...]] = (
    llama_3_1_70b,
    qwen3_30b_a3b,
    deepseek_v3,
    gemma3_27b,
    phi3_5_mini,
    gpt_oss_120b,
    qwen3_next_80b,
    jamba_1_5_mini,
    nemotron_3_nano,
    falcon_40b_old,
    falcon_40b_new,
    gpt2,
    gpt2_xl,
    qwen3_vl_32b,
    qwen3_32b,
    kimi_k2_5_nvfp4,
    nemotron_super_49b,
    gemma4_26b_a4b,
    kimi_k3,
)
"""Every config that needs no argument."""
