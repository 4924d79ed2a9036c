"""Keeping the first tokens of a pass, against a prefill that never went further."""

import random

import pytest
import torch
from hybrid_maker import tiny_hybrid
from test_kv_cache import tiny_llama

from hscache import kv_cache, rollback

BLOCK = 6


@pytest.fixture(scope="module", params=["llama", "hybrid"])
def model(request):
    return tiny_llama() if request.param == "llama" else tiny_hybrid()


@pytest.fixture(scope="module")
def hybrid():
    return tiny_hybrid()


@torch.inference_mode()
def forward(model, cache, ids: list[int]) -> torch.Tensor:
    argument = kv_cache.as_argument(model, cache)
    return model(torch.tensor([ids]), **argument, use_cache=True).logits[0]


def prefill(model, ids: list[int]):
    cache = kv_cache.new_cache(model)
    forward(model, cache, ids)
    return cache


def states(cache) -> list[torch.Tensor]:
    """All tensors of a cache, layer by layer."""
    return [
        state
        for layer in cache.layers
        for state in (
            (layer.conv_states[0], layer.recurrent_states[0])
            if hasattr(layer, "conv_states")
            else (layer.keys, layer.values)
        )
    ]


def distances(found, expected) -> list[float]:
    """Largest difference of each state over the largest value it should have."""
    pairs = list(zip(states(found), states(expected), strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def try_block(model, cache, block: list[int], num_kept: int) -> None:
    with rollback.trial(model, cache) as trial:
        forward(model, cache, block)
    trial.keep(num_kept)


PROMPTS = {n: [(7 * i + n) % 90 for i in range(n)] for n in (1, 2, 3, 5, 64, 70)}
"""Around the width of the convolution (4) and the chunk of the scan (64)."""
DRAFTS = [91, 13, 2, 77, 5, 40]


@pytest.mark.parametrize("num_kept", range(BLOCK + 1))
@pytest.mark.parametrize("num_prompt", PROMPTS)
def test_every_state_is_that_of_a_prefill_of_the_kept_tokens(model, num_prompt, num_kept):
    prompt = PROMPTS[num_prompt]
    cache = prefill(model, prompt)
    try_block(model, cache, DRAFTS, num_kept)
    expected = prefill(model, prompt + DRAFTS[:num_kept])
    assert kv_cache.length(cache) == num_prompt + num_kept
    assert max(distances(cache, expected)) < 1e-5
    following = [3, 60]
    torch.testing.assert_close(
        forward(model, cache, following), forward(model, expected, following), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("seed", range(3))
def test_many_trials_in_a_row_do_not_drift(model, seed):
    rng = random.Random(seed)
    ids = [rng.randrange(90) for _ in range(3)]
    cache = prefill(model, ids)
    for _ in range(25):
        block = [rng.randrange(90) for _ in range(rng.randint(1, 16))]
        num_kept = rng.randint(0, len(block))
        try_block(model, cache, block, num_kept)
        ids += block[:num_kept]
    assert len(ids) > 64
    assert max(distances(cache, prefill(model, ids))) < 1e-5


def test_a_pass_that_is_not_rolled_back_leaves_its_mark_on_every_recurrent_state(hybrid):
    """Otherwise the tests above would pass without any rollback."""
    cache = prefill(hybrid, PROMPTS[70])
    forward(hybrid, cache, DRAFTS)
    expected = prefill(hybrid, PROMPTS[70] + DRAFTS[:2])
    pairs = zip(cache.layers, expected.layers, strict=True)
    recurrent = [(a, b) for a, b in pairs if hasattr(a, "conv_states")]
    assert len(recurrent) == 6
    for found, wanted in recurrent:
        for name in ("conv_states", "recurrent_states"):
            a, b = getattr(found, name)[0], getattr(wanted, name)[0]
            assert (a - b).abs().max() > 0.05 * b.abs().max()


def test_keys_and_values_of_kept_tokens_are_those_of_the_pass(model):
    cache = prefill(model, PROMPTS[5])
    with rollback.trial(model, cache) as trial:
        forward(model, cache, DRAFTS)
    layers = kv_cache.attention_layers(cache)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    trial.keep(2)
    for layer, (keys, values) in zip(layers, before, strict=True):
        assert torch.equal(layer.keys, keys[:, :, : 5 + 2])
        assert torch.equal(layer.values, values[:, :, : 5 + 2])


@pytest.mark.parametrize(("num_kept", "lengths"), [(0, []), (1, [1]), (5, [5]), (6, [])])
def test_only_the_delta_nets_run_again_and_only_over_the_kept_tokens(hybrid, num_kept, lengths):
    cache = prefill(hybrid, PROMPTS[5])
    with rollback.trial(hybrid, cache) as trial:
        forward(hybrid, cache, DRAFTS)
    seen = {"linear_attn": [], "other": []}

    def count(name):
        def hook(_module, args, _output):
            seen[name].append(args[0].shape[1] if args else None)

        return hook

    handles = [
        module.register_forward_hook(
            count("linear_attn" if name.endswith("linear_attn") else "other")
        )
        for name, module in hybrid.named_modules()
        if name.rpartition(".")[2] in ("linear_attn", "self_attn", "mlp", "lm_head", "embed_tokens")
    ]
    trial.keep(num_kept)
    for handle in handles:
        handle.remove()
    assert seen == {"linear_attn": 6 * lengths, "other": []}


def test_no_hook_is_left_even_if_the_pass_fails(hybrid):
    cache = prefill(hybrid, PROMPTS[5])
    with pytest.raises(ZeroDivisionError), rollback.trial(hybrid, cache):
        raise ZeroDivisionError
    assert not any(module._forward_pre_hooks for module in hybrid.modules())


def test_keeping_more_than_was_passed_is_a_bug(model):
    cache = prefill(model, PROMPTS[5])
    with rollback.trial(model, cache) as trial:
        forward(model, cache, DRAFTS)
    with pytest.raises(AssertionError, match="cannot keep 7 of 6 tokens"):
        trial.keep(7)
