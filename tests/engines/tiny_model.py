"""A random Llama small enough for any test, and what engines load beside a model: adapters and tokenizers."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 512
LAYERS: Final = 4
HIDDEN: Final = 128
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 32


def llama(folder: Path, **changes: Any) -> Path:
    """Write a model whose next token depends on the whole prompt; it has no tokenizer. `changes`: of its config."""
    import torch
    import transformers

    torch.manual_seed(0)
    plain = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
    }
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**plain, **changes})).save_pretrained(folder)
    return folder


def with_another_weight(model: Path, folder: Path) -> Path:
    """A copy of `model` in which one number of the first layer's keys is another."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"][0, 0] += 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def lora(folder: Path, seed: int) -> Path:
    """Write an adapter that changes queries, keys and values of every layer, as PEFT writes one."""
    import torch
    from safetensors.torch import save_file

    rank, chance = 8, torch.Generator().manual_seed(seed)
    widths = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    tensors = {}
    for layer in range(LAYERS):
        for name, width in widths.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = 0.3 * torch.randn(rank, HIDDEN, generator=chance)
            tensors[f"{place}.lora_B.weight"] = 0.3 * torch.randn(width, rank, generator=chance)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "bias": "none"}
    config |= {"r": rank, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": list(widths)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def tokenizer(folder: Path, first_word: str) -> Path:
    """Write a tokenizer of numbered words; the words of two differ in the first one."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "</s>", first_word, *(f"w{number}" for number in range(3, VOCABULARY))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="</s>"
    ).save_pretrained(folder)
    return folder


def prompt(number: int, tokens: int = 1100) -> list[int]:
    """Token ids that begin like no other prompt's; without `tokens`, four whole chunks of 256 and more."""
    chance = random.Random(number + 1)
    return [chance.randrange(3, 500) for _ in range(tokens)]
