"""Rollback and the slot cache against transformers' own cache, on a tiny random Llama."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.models.mistral import MistralConfig

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


def prefill(model: LlamaForCausalLM, ids: list[int]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([ids]), **kv_cache.as_argument(model, cache), use_cache=True)
    return cache


def test_length_of_a_new_cache_is_zero(model):
    cache = DynamicCache(config=model.config)
    assert kv_cache.length(cache) == 0
    kv_cache.truncate(cache, 0)
    assert kv_cache.length(DynamicCache()) == 0


@pytest.mark.parametrize("keep", [0, 1, 7, 12])
def test_truncate_keeps_exactly_the_first_positions(model, keep):
    cache = prefill(model, list(range(12)))
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    kv_cache.truncate(cache, keep)
    assert kv_cache.length(cache) == keep
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys[:, :, :keep])
        assert torch.equal(layer.values, values[:, :, :keep])


def test_forward_after_truncate_equals_a_forward_that_never_went_further(model):
    wrong, right = [5, 6, 7, 8], [50, 51, 52]
    rolled, fresh = prefill(model, [*range(9), *wrong]), prefill(model, list(range(9)))
    kv_cache.truncate(rolled, 9)
    with torch.inference_mode():
        a, b = (
            model(
                torch.tensor([right]), **kv_cache.as_argument(model, cache), use_cache=True
            ).logits
            for cache in (rolled, fresh)
        )
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert kv_cache.length(rolled) == 12


def test_truncate_to_more_than_is_cached_is_a_bug(model):
    with pytest.raises(AssertionError, match="cannot truncate"):
        kv_cache.truncate(prefill(model, [1, 2, 3]), 4)


def test_sliding_window_cache_is_refused_by_name():
    config = MistralConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    for operation in (kv_cache.length, lambda cache: kv_cache.truncate(cache, 0)):
        with pytest.raises(UnsupportedTargetError, match="DynamicSlidingWindowLayer"):
            operation(DynamicCache(config=config))


def test_static_cache_is_refused_by_name(model):
    with pytest.raises(UnsupportedTargetError, match="StaticLayer"):
        kv_cache.length(StaticCache(config=model.config, max_cache_len=8))


def test_recurrent_cache_is_refused_by_name():
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(UnsupportedTargetError, match=r"layer 0 .*Linear"):
        kv_cache.truncate(DynamicCache(config=config), 0)


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
