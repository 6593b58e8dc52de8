"""The transformers adapter over a real gateway and a real, tiny model: same tokens with and without reuse."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvgw[transformers]'")
transformers = pytest.importorskip("transformers", reason="not installed: pip install 'kvgw[transformers]'")

from kvgw.engines.transformers import KVReuse, ModelIdentity  # noqa: E402  # needs both
from kvgw.engines.transformers import cache as caches  # noqa: E402
from kvgw.engines.transformers.format import format_of  # noqa: E402
from kvgw.errors import FormatError  # noqa: E402
from kvgw.model import Durability, Label, Outcome, PutOutcome  # noqa: E402
from tests.support.aio import aio  # noqa: E402
from tests.support.gateways import House, house  # noqa: E402

CHUNK = 16
PROMPT = 100
"""Six whole chunks and four tokens."""
IDENTITY = ModelIdentity(name="test/tiny", weights=b"w" * 32, tokenizer=b"t" * 32)

Model = transformers.PreTrainedModel
Tokens = torch.Tensor


def config(**changes: object) -> transformers.LlamaConfig:
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # wide enough that the next token depends on the whole prompt
        "eos_token_id": None,
        "bos_token_id": 0,
    }
    return transformers.LlamaConfig(**{**sizes, **changes})


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config()).eval()


@pytest.fixture(scope="module")
def prompt() -> Tokens:
    return torch.randint(128, (1, PROMPT), generator=torch.Generator().manual_seed(1))


async def reuse_of(gateway: House, model: Model, namespace: str = "", identity: ModelIdentity = IDENTITY) -> KVReuse:
    return await KVReuse.open(gateway.client(namespace), model, identity, tokens_per_chunk=CHUNK)


def prefill(model: Model, ids: Tokens) -> transformers.DynamicCache:
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(ids, use_cache=True, **caches.cache_argument(model, cache))
    return cache


def generate(model: Model, ids: Tokens, cache: transformers.DynamicCache) -> list[int]:
    arguments = caches.cache_argument(model, cache)
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, **arguments)[0].tolist()


@aio
async def test_a_restored_prompt_goes_on_as_if_it_had_been_computed(
    tmp_path: Path, model: Model, prompt: Tokens
) -> None:
    cold = generate(model, prompt, transformers.DynamicCache())
    cache = prefill(model, prompt)
    async with house("embedded", tmp_path) as gateway:
        stored = await (await reuse_of(gateway, model)).store(prompt, cache)
        assert stored.outcomes == (PutOutcome.STORED,) * 6
        assert stored.tokens == 96
        again = await (await reuse_of(gateway, model)).store(prompt, cache)
        assert again.outcomes == (PutOutcome.HAVE,) * 6
    async with house("embedded", tmp_path) as gateway:  # another process would find no more than the folder either
        restored = await (await reuse_of(gateway, copy.deepcopy(model))).restore(prompt)
    assert (restored.tokens, restored.tiers) == (96, ("nvme",) * 6)
    assert restored.payload_bytes == 96 * 3 * 2 * 2 * 16 * 4
    assert restored.cache.get_seq_length() == 96
    for mine, theirs in zip(restored.cache.layers, cache.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys[:, :, :96])
        assert torch.equal(mine.values, theirs.values[:, :, :96])
    assert generate(model, prompt, restored.cache) == cold


@aio
async def test_forward_takes_the_rest_of_the_prompt(tmp_path: Path, model: Model, prompt: Tokens) -> None:
    async with house("embedded", tmp_path) as gateway:
        reuse = await reuse_of(gateway, model)
        await reuse.store(prompt, prefill(model, prompt))
        restored = await reuse.restore(prompt)
        arguments = reuse.cache_argument(restored.cache)
    with torch.no_grad():
        whole = model(prompt).logits[0, -1]
        rest = model(prompt[:, restored.tokens :], use_cache=True, **arguments).logits[0, -1]
    torch.testing.assert_close(rest, whole)


@aio
async def test_a_prompt_that_parts_later_shares_what_comes_before(tmp_path: Path, model: Model, prompt: Tokens) -> None:
    other = prompt.clone()
    other[0, 40] = (other[0, 40] + 1) % 128
    cold = generate(model, other, transformers.DynamicCache())
    async with house("embedded", tmp_path) as gateway:
        reuse = await reuse_of(gateway, model)
        await reuse.store(prompt, prefill(model, prompt))
        restored = await reuse.restore(other)
        assert restored.tokens == 32, "chunks of 16 tokens, and token 40 differs"
        assert generate(model, other, restored.cache) == cold
        stored = await reuse.store(other, restored.cache)
        assert stored.outcomes == (PutOutcome.HAVE,) * 2 + (PutOutcome.STORED,) * 4, "the cache held all by then"
        assert (await reuse.restore(other)).tokens == 96


@pytest.mark.parametrize(("length", "restorable"), [(0, 0), (1, 0), (15, 0), (16, 0), (17, 16), (96, 80), (97, 96)])
@aio
async def test_the_last_token_is_never_restored(
    tmp_path: Path, model: Model, prompt: Tokens, length: int, restorable: int
) -> None:
    async with house("embedded", tmp_path) as gateway:
        reuse = await reuse_of(gateway, model)
        await reuse.store(prompt, prefill(model, prompt))
        assert (await reuse.restore(prompt[:, :length])).tokens == restorable
        assert (await reuse.restore(prompt[0, :length].tolist())).tokens == restorable


@aio
async def test_long_sequences_go_in_batches(
    tmp_path: Path, model: Model, prompt: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgw.engines.transformers.reuse._BATCH_BYTES", 50_000)  # four chunks of 12,288 bytes
    monkeypatch.setattr("kvgw.engines.transformers.reuse.KEYS_MAX", 5)
    async with house("embedded", tmp_path) as gateway:
        reuse = await reuse_of(gateway, model)
        cache = prefill(model, prompt)
        assert (await reuse.store(prompt, cache)).outcomes == (PutOutcome.STORED,) * 6
        restored = await reuse.restore(prompt)
        assert restored.tokens == 96
        assert torch.equal(restored.cache.layers[2].values, cache.layers[2].values[:, :, :96])
        keys = reuse.keys(prompt)
        await reuse._client.delete(reuse.registered, keys[5:])
        assert (await reuse.restore(prompt)).tokens == 80


@aio
async def test_what_a_quota_refuses_ends_the_run(tmp_path: Path, model: Model, prompt: Tokens) -> None:
    async with house("embedded", tmp_path) as gateway:
        await gateway.namespace("tight", limit_objects=2)
        reuse = await reuse_of(gateway, model, "tight")
        stored = await reuse.store(prompt, prefill(model, prompt))
        assert stored.outcomes[:3] == (PutOutcome.STORED, PutOutcome.STORED, PutOutcome.OVER_QUOTA)
        assert stored.tokens == 32
        assert stored.reason
        assert (await reuse.restore(prompt)).tokens == 32


@aio
async def test_nobody_else_finds_it(tmp_path: Path, model: Model, prompt: Tokens) -> None:
    changed = {
        "adapter": replace(IDENTITY, adapter="lora", adapter_digest=b"a" * 32),
        "weights": replace(IDENTITY, weights=b"v" * 32),
        "revision": replace(IDENTITY, weights="0123abcd" * 5),
        "tokenizer": replace(IDENTITY, tokenizer=b"u" * 32),
        "name": replace(IDENTITY, name="test/other"),
    }
    half = copy.deepcopy(model).to(torch.bfloat16)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    async with house("embedded", tmp_path) as gateway:
        await gateway.namespace("other")
        reuse = await reuse_of(gateway, model)
        await reuse.store(prompt, prefill(model, prompt), salt=b"alice")
        others = {name: await reuse_of(gateway, model, identity=identity) for name, identity in changed.items()}
        others["namespace"] = await reuse_of(gateway, model, "other")
        others["dtype"] = await reuse_of(gateway, half)
        others["attention"] = await reuse_of(gateway, eager)
        others["chunk"] = await KVReuse.open(gateway.client(), model, IDENTITY, tokens_per_chunk=CHUNK * 2)
        for name, other in others.items():
            assert (await other.restore(prompt, salt=b"alice")).tokens == 0, name
        for salt in (b"", b"bob"):
            assert (await reuse.restore(prompt, salt=salt)).tokens == 0
        assert (await reuse.restore(prompt, salt=b"alice")).tokens == 96


@aio
async def test_labels_ttl_and_durability_pass_through(tmp_path: Path, model: Model, prompt: Tokens) -> None:
    async with house("embedded", tmp_path) as gateway:
        reuse = await reuse_of(gateway, model)
        stored = await reuse.store(
            prompt, prefill(model, prompt), labels=[Label("user", "alice")], ttl=60, durability=Durability.STAGED
        )
        left_s = (stored.expires_ms - gateway.opened.rooms.time.now_ms()) / 1000
        assert 30 < left_s <= 60
        labels = await gateway.opened.rooms.catalog._database.read(
            lambda connection: connection.exec_driver_sql("SELECT count(*) FROM entry_label").scalar_one()
        )
        assert labels == 6


@aio
async def test_a_damaged_chunk_is_computed_again(tmp_path: Path, model: Model, prompt: Tokens) -> None:
    cold = generate(model, prompt, transformers.DynamicCache())
    async with house("embedded", tmp_path) as gateway:
        await (await reuse_of(gateway, model)).store(prompt, prefill(model, prompt))
    for file in (tmp_path / "nvme").rglob("*"):
        if file.is_file() and file.stat().st_size > 12_288:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
            break
    else:
        pytest.fail("no chunk lies on disk")
    async with house("embedded", tmp_path) as gateway:
        reuse = await reuse_of(gateway, model)
        restored = await reuse.restore(prompt)
        assert restored.tokens < 96
        assert restored.outcome is Outcome.OK
        assert generate(model, prompt, restored.cache) == cold
        await reuse.store(prompt, restored.cache)
        assert (await reuse.restore(prompt)).tokens == 96, "what was damaged is replaced"


@aio
async def test_without_a_gateway_everything_is_computed(tmp_path: Path, model: Model, prompt: Tokens) -> None:
    async with house("embedded", tmp_path) as gateway:
        reuse = await reuse_of(gateway, model)
        await reuse.store(prompt, prefill(model, prompt))
    restored = await reuse.restore(prompt)
    assert (restored.tokens, restored.outcome) == (0, Outcome.OUTAGE)
    assert restored.reason
    cold = generate(model, prompt, transformers.DynamicCache())
    assert generate(model, prompt, restored.cache) == cold
    stored = await reuse.store(prompt, restored.cache)
    assert (stored.tokens, stored.outcome) == (0, Outcome.OUTAGE)


def refusal(model: Model, identity: ModelIdentity = IDENTITY) -> str:
    with pytest.raises(FormatError) as refused:
        format_of(model, identity, CHUNK)
    return str(refused.value)


def test_models_are_refused_with_the_reason(model: Model) -> None:
    small = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    window = transformers.MistralConfig(**small, **heads, sliding_window=32, max_position_embeddings=512)
    assert "window" in refusal(transformers.MistralForCausalLM(window).eval())
    t5 = transformers.T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    assert "encoder-decoder" in refusal(transformers.T5ForConditionalGeneration(t5).eval())
    dynamic = config(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    assert "'dynamic' changes its frequencies" in refusal(transformers.LlamaForCausalLM(dynamic).eval())
    assert "cannot generate" in refusal(model.model)
    assert "not a transformers model" in refusal(torch.nn.Linear(1, 1))
    training = copy.deepcopy(model).train()
    assert "call model.eval()" in refusal(training)
    with torch.device("meta"):
        assert "lies on meta" in refusal(transformers.LlamaForCausalLM(config()).eval())
    adapted = copy.deepcopy(model)
    adapted._hf_peft_config_loaded = True
    assert "an adapter is loaded" in refusal(adapted)
    assert format_of(adapted, replace(IDENTITY, adapter="lora", adapter_digest=b"a" * 32), CHUNK).adapter == "lora"


@aio
async def test_a_model_that_changed_is_refused(tmp_path: Path, model: Model, prompt: Tokens) -> None:
    mine = copy.deepcopy(model)
    async with house("embedded", tmp_path) as gateway:
        reuse = await reuse_of(gateway, mine)
        mine.to(torch.float16)
        with pytest.raises(FormatError, match="kv_dtype is now 'float16', and was 'float32'"):
            await reuse.restore(prompt)
        mine.to(torch.float32)
        mine.set_attn_implementation("eager")
        with pytest.raises(FormatError, match="engine_abi is now"):
            await reuse.restore(prompt)


def test_caches_are_refused_with_the_reason(model: Model, prompt: Tokens) -> None:
    kv_format = format_of(model, IDENTITY, CHUNK)

    def reason(cache: object) -> str:
        with pytest.raises(FormatError) as refused:
            caches.Layers.of(cache, kv_format)
        return str(refused.value)

    assert caches.Layers.of(transformers.DynamicCache(), kv_format).tokens == 0
    static = transformers.StaticCache(config=model.config, max_cache_len=64)
    assert "StaticCache cannot be stored" in reason(static)
    assert "offloading" in reason(transformers.DynamicCache(offloading=True))
    assert "[2, 2, 100, 16]" in reason(prefill(model, prompt.repeat(2, 1)))
    assert "bfloat16" in reason(prefill(copy.deepcopy(model).to(torch.bfloat16), prompt))
    short = prefill(model, prompt)
    short.layers.pop()
    assert "2 layers, and the model's format says 3" in reason(short)
    ragged = prefill(model, prompt)
    ragged.layers[1].crop(-1)
    assert "layer 1" in reason(ragged)
    sliding = transformers.DynamicCache(config=config(layer_types=["sliding_attention"] * 3, sliding_window=32))
    for index, layer in enumerate(prefill(model, prompt).layers):
        sliding.update(layer.keys, layer.values, index)
    assert "keeps the last 31 of 100 (sliding window)" in reason(sliding)


def test_a_sliding_cache_that_dropped_nothing_is_whole(model: Model, prompt: Tokens) -> None:
    kv_format = format_of(model, IDENTITY, CHUNK)
    wide = transformers.DynamicCache(config=config(layer_types=["sliding_attention"] * 3, sliding_window=512))
    for index, layer in enumerate(prefill(model, prompt).layers):
        wide.update(layer.keys, layer.values, index)
    assert caches.Layers.of(wide, kv_format).tokens == PROMPT


def test_only_one_sequence_at_a_time(prompt: Tokens) -> None:
    assert caches.token_ids(prompt) == caches.token_ids(prompt[0]) == caches.token_ids(prompt[0].tolist())
    with pytest.raises(FormatError, match="2 sequences; give one at a time"):
        caches.token_ids(prompt.repeat(2, 1))
    with pytest.raises(FormatError, match=r"not torch\.float32 of \[1, 100\]"):
        caches.token_ids(prompt.float())


def test_the_parameter_is_named_as_the_release_names_it() -> None:
    class Newer:
        def forward(self, input_ids: object, cache: object = None) -> None: ...

    class Older:
        def forward(self, input_ids: object, past_key_values: object = None) -> None: ...

    class Neither:
        def forward(self, input_ids: object) -> None: ...

    cache = transformers.DynamicCache()
    assert caches.cache_argument(Newer(), cache) == {"cache": cache}
    assert caches.cache_argument(Older(), cache) == {"past_key_values": cache}
    with pytest.raises(FormatError, match=r"Neither\.forward has no parameter cache or past_key_values"):
        caches.cache_argument(Neither(), cache)


def tokenizer(words: list[str]) -> transformers.PreTrainedTokenizerFast:
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, words[0]))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0], pad_token=words[0])


def test_an_identity_in_memory_is_that_of_the_content(model: Model) -> None:
    words = tokenizer(["?", "a", "b"])
    mine = ModelIdentity.of_memory("test/tiny", model, words)
    changed = copy.deepcopy(model)
    words("a b a b", truncation=True, max_length=2, padding="max_length")
    assert ModelIdentity.of_memory("test/tiny", changed, words) == mine, "using a tokenizer does not change it"
    assert ModelIdentity.of_memory("test/tiny", model, tokenizer(["?", "b", "a"])).tokenizer != mine.tokenizer
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    other = ModelIdentity.of_memory("test/tiny", changed, words)
    assert other.weights != mine.weights
    assert other.tokenizer == mine.tokenizer


def test_an_identity_of_files_is_that_of_the_content(tmp_path: Path, model: Model) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        model.save_pretrained(folder)
        tokenizer(["?", "a"]).save_pretrained(folder)
    one, two = (ModelIdentity.of_folder("test/tiny", folder) for folder in folders)
    assert one == two
    weights = folders[1] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert ModelIdentity.of_folder("test/tiny", folders[1]).weights != one.weights
    (folders[1] / "tokenizer.json").write_text("{}")
    assert ModelIdentity.of_folder("test/tiny", folders[1]).tokenizer != one.tokenizer
    for name, missing in (("tokenizer*", r"tokenizer\*"), ("model.safetensors", r"\*\.safetensors")):
        for file in folders[0].glob(name):
            file.unlink()
        with pytest.raises(FormatError, match=f"holds no file that matches {missing}"):
            ModelIdentity.of_folder("test/tiny", folders[0])


def test_digests_of_files_are_remembered_outside_the_models_folder(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvgw.engines import identity

    folder, cache_dir = tmp_path / "model", tmp_path / "cache"
    model.save_pretrained(folder)
    tokenizer(["?", "a"]).save_pretrained(folder)
    before = sorted(folder.iterdir())
    first = ModelIdentity.of_folder("test/tiny", folder, cache_dir=cache_dir)
    assert sorted(folder.iterdir()) == before
    with pytest.raises(FormatError, match="never written to"):
        ModelIdentity.of_folder("test/tiny", folder, cache_dir=folder)

    def never(path: Path, before: os.stat_result) -> bytes:
        raise AssertionError(f"read {path} again")

    monkeypatch.setattr(identity, "_read_digest", never)
    assert ModelIdentity.of_folder("test/tiny", folder, cache_dir=cache_dir) == first
    monkeypatch.undo()
    for entry in cache_dir.iterdir():
        entry.write_bytes(b"half")
    assert ModelIdentity.of_folder("test/tiny", folder, cache_dir=cache_dir) == first
