"""The slot cache against transformers' caches of single prompts, and which targets are refused."""

import pytest
import torch
from hybrid_maker import tiny_hybrid
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)

from hscache import kv_cache
from hscache.errors import UnsupportedTargetError


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def prefill(model, ids: list[int]) -> DynamicCache:
    cache = kv_cache.new_cache(model)
    with torch.inference_mode():
        model(torch.tensor([ids]), **kv_cache.as_argument(model, cache), use_cache=True)
    return cache


@pytest.fixture(scope="module")
def hybrid():
    return tiny_hybrid()


def test_length_counts_the_positions_of_attention_layers(model, hybrid):
    for target in (model, hybrid):
        assert kv_cache.length(kv_cache.new_cache(target)) == 0
        assert kv_cache.length(prefill(target, list(range(12)))) == 12


def random_model(model_type: str, **changes):
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **{**sizes, **changes})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("model_type", "changes", "layer"),
    [
        ("mistral", {"sliding_window": 4}, "DynamicSlidingWindowLayer"),
        ("mamba", {}, "LinearAttentionLayer"),
        ("mamba2", {"num_heads": 4, "head_dim": 16, "n_groups": 1}, "LinearAttentionLayer"),
        ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4}, "LinearAttentionAndFull"),
        ("qwen3_next", {"num_experts": 2}, "LinearAttentionLayer"),
        ("qwen3_5_moe_text", {"num_experts": 2}, "LinearAttentionLayer"),
    ],
)
def test_other_recurrent_and_sliding_targets_are_refused_by_name(model_type, changes, layer):
    with pytest.raises(UnsupportedTargetError, match=rf"'{model_type}' cannot .* 0 is a {layer}"):
        kv_cache.new_cache(random_model(model_type, **changes))


def test_a_recurrent_target_without_layers_in_its_cache_is_refused():
    with pytest.raises(UnsupportedTargetError, match=r"'rwkv' .* takes no key/value cache"):
        kv_cache.new_cache(random_model("rwkv"))


def columns_of(cache: kv_cache.SlotCache, slot: int, num_columns: int) -> list[torch.Tensor]:
    return [
        x[slot, :, x.shape[-2] - num_columns :]
        for layer in cache.layers
        for x in (layer.keys, layer.values)
    ]


def prompt_columns(cache: DynamicCache) -> list[torch.Tensor]:
    return [x[0] for layer in cache.layers for x in (layer.keys, layer.values)]


def test_slots_keep_their_columns_through_adding_appending_replacing_trimming_and_dropping(model):
    lengths = [5, 11, 2]
    prompts = [prefill(model, list(range(7 * n, 7 * n + n))) for n in lengths]
    expected = [prompt_columns(prompt) for prompt in prompts]
    cache = kv_cache.SlotCache()
    assert cache.width == 0
    for prompt in prompts:
        cache.add(prompt)
    assert cache.width == 11

    def check() -> None:
        assert cache.width >= max(lengths)
        for slot, num_columns in enumerate(lengths):
            for found, wanted in zip(
                columns_of(cache, slot, num_columns), expected[slot], strict=True
            ):
                assert torch.equal(found, wanted)

    check()
    # 150 appended columns make the buffers grow more than once.
    for _ in range(150):
        for layer_id, layer in enumerate(cache.layers):
            new = torch.randn(3, 2, 1, layer.keys.shape[-1])
            cache.update(new, -new, layer_id)
            for slot in range(3):
                expected[slot][2 * layer_id] = torch.cat(
                    [expected[slot][2 * layer_id], new[slot]], 1
                )
                expected[slot][2 * layer_id + 1] = torch.cat(
                    [expected[slot][2 * layer_id + 1], -new[slot]], 1
                )
        lengths = [n + 1 for n in lengths]
    check()

    short, long = prefill(model, [1, 2, 3]), prefill(model, list(range(90)) * 3)
    cache.replace(1, short)
    lengths[1], expected[1] = 3, prompt_columns(short)
    check()
    cache.trim(max(lengths))
    assert cache.width == 155
    check()
    cache.replace(0, long)  # longer than the cache is wide: it widens on the left
    lengths[0], expected[0] = 270, prompt_columns(long)
    check()
    cache.keep([2, 0])
    lengths, expected = [lengths[2], lengths[0]], [expected[2], expected[0]]
    check()
    cache.keep([0])
    cache.trim(lengths[0])
    lengths, expected = lengths[:1], expected[:1]
    check()
    cache.keep([])
    assert cache.width == 0


def test_left_over_columns_are_finite(model):
    cache = kv_cache.SlotCache()
    cache.add(prefill(model, [1, 2]))
    cache.add(prefill(model, list(range(40))))
    for layer in cache.layers:
        assert torch.isfinite(layer.keys).all()
        assert torch.isfinite(layer.values).all()


def test_slots_of_a_hybrid_keep_their_states(hybrid):
    lengths = [5, 1, 70]
    prompts = [prefill(hybrid, list(range(n))) for n in lengths]
    short = prefill(hybrid, [9, 8, 7])

    def check(expected: list[DynamicCache]) -> None:
        for slot, prompt in enumerate(expected):
            for found, wanted in zip(cache.layers, prompt.layers, strict=True):
                if not hasattr(wanted, "conv_states"):
                    continue
                assert torch.equal(found.conv_states[0][slot], wanted.conv_states[0][0])
                assert torch.equal(found.recurrent_states[0][slot], wanted.recurrent_states[0][0])

    cache = kv_cache.SlotCache()
    for prompt in prompts:
        cache.add(prompt)
    assert cache.width == 70
    check(prompts)
    cache.replace(1, short)
    check([prompts[0], short, prompts[2]])
    cache.keep([1, 0])
    cache.trim(5)
    check([short, prompts[0]])
    assert cache.width == 5
    cache.keep([])
    assert cache.width == 0
