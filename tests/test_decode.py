"""Speculative decoding of a tiny random Llama in fp32, against a plain loop without any cache."""

import random
from collections.abc import Sequence

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.decode import (
    DecodeMismatchError,
    DecodeResult,
    Equality,
    compare_with_greedy,
    plain_greedy,
    speculative_decode,
    ulp_gap,
)

LAYER_IDS = [0, 2, 1]  # not sorted: the order of the features is the caller's
HIDDEN = 32
VOCAB = 23


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def slow_greedy(model, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The whole text is run again for every token; no cache, no stop."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


class Recorder:
    """Proposes what `guess(position, num_tokens)` returns and records all it is told."""

    def __init__(self, guess) -> None:
        self.guess = guess
        self.features: list[torch.Tensor] = []
        self.calls: list[tuple[int, int, int, int]] = []

    def observe(self, features_nF: torch.Tensor) -> None:
        self.features.append(features_nF.clone())

    def propose(self, anchor_id: int, position: int, num_tokens: int) -> list[int]:
        num_context = sum(len(f) for f in self.features)
        self.calls.append((anchor_id, position, num_tokens, num_context))
        return self.guess(position, num_tokens)


def oracle(text: Sequence[int]):
    return lambda position, num: [*text[position + 1 : position + 1 + num], *[0] * num][:num]


def always_wrong(text: Sequence[int]):
    return lambda position, num: [(t + 1) % VOCAB for t in oracle(text)(position, num)]


def often_right(text: Sequence[int], seed: int):
    rng = random.Random(seed)
    return lambda position, num: [
        t if rng.random() < 0.7 else rng.randrange(VOCAB) for t in oracle(text)(position, num)
    ]


def decode(
    model, prompt, recorder, *, block_size=4, max_new_tokens=20, stop_ids=()
) -> DecodeResult:
    return speculative_decode(
        model, prompt, recorder, target_layer_ids=LAYER_IDS, block_size=block_size,
        max_new_tokens=max_new_tokens, stop_ids=stop_ids,
    )  # fmt: skip


PROMPT = [4, 8, 15, 16, 22, 3]


@pytest.fixture(scope="module")
def text(model) -> list[int]:
    """Prompt and 40 greedy tokens."""
    return [*PROMPT, *slow_greedy(model, PROMPT, 40)]


def first_seen(ids: Sequence[int], lowest: int) -> int:
    """Index of the first token, not before `lowest`, that has not occurred earlier."""
    return next(i for i in range(lowest, len(ids)) if ids[i] not in ids[:i])


def test_plain_greedy_equals_the_loop_without_cache(model, text):
    assert plain_greedy(model, PROMPT, 40, ()) == text[6:]
    assert plain_greedy(model, PROMPT, 1, ()) == text[6:7]


def test_plain_greedy_ends_with_the_stop_token(model, text):
    stop = first_seen(text[6:], 2)
    assert plain_greedy(model, PROMPT, 40, {text[6 + stop]}) == text[6 : 7 + stop]


@pytest.mark.parametrize("block_size", [1, 2, 4, 9])
@pytest.mark.parametrize("seed", [0, 1])
def test_any_proposer_gives_the_greedy_text(model, text, block_size, seed):
    rng = random.Random(seed)
    for guess in (
        often_right(text, seed),
        lambda _, num: [rng.randrange(VOCAB) for _ in range(num)],
    ):
        result = decode(model, PROMPT, Recorder(guess), block_size=block_size, max_new_tokens=33)
        assert result.ids == text[6 : 6 + 33]
        assert result.committed == 32
        assert result.finish_reason == "length"


def test_always_wrong_proposer_commits_one_token_a_step(model, text):
    result = decode(model, PROMPT, Recorder(always_wrong(text)), max_new_tokens=12)
    assert result.ids == text[6:18]
    assert result.acceptance_lengths == [1] * 11
    assert result.steps == 11


def test_oracle_proposer_commits_a_block_a_step(model, text):
    result = decode(model, PROMPT, Recorder(oracle(text)), block_size=4, max_new_tokens=21)
    assert result.ids == text[6:27]
    assert result.acceptance_lengths == [4] * 5


@pytest.mark.parametrize(
    ("max_new_tokens", "lengths", "asked"),
    [
        (1, [], []),
        (2, [1], [1]),
        (3, [2], [2]),
        (8, [4, 3], [3, 3]),
        (9, [4, 4], [3, 3]),
        (10, [4, 4, 1], [3, 3, 1]),
    ],
)
def test_last_block_is_cut_at_max_new_tokens(model, text, max_new_tokens, lengths, asked):
    recorder = Recorder(oracle(text))
    result = decode(model, PROMPT, recorder, block_size=4, max_new_tokens=max_new_tokens)
    assert result.ids == text[6 : 6 + max_new_tokens]
    assert result.acceptance_lengths == lengths
    assert [num for _, _, num, _ in recorder.calls] == asked


def test_block_of_one_never_asks_the_proposer(model, text):
    recorder = Recorder(oracle(text))
    assert (
        decode(model, PROMPT, recorder, block_size=1, max_new_tokens=5).acceptance_lengths
        == [1] * 4
    )
    assert recorder.calls == []


def test_stop_token_inside_an_accepted_run_ends_the_text(model, text):
    new = text[6:]
    stop = next(i for i in range(2, 40) if new[i] not in new[:i] and i % 7 not in (0, 1))
    recorder = Recorder(oracle(text))
    result = decode(model, PROMPT, recorder, block_size=8, max_new_tokens=40, stop_ids={new[stop]})
    assert result.ids == new[: stop + 1]
    assert result.finish_reason == "stop"
    assert result.acceptance_lengths[-1] < 8
    assert sum(result.acceptance_lengths) == stop


def test_stop_token_from_the_prefill_needs_no_step(model, text):
    result = decode(model, PROMPT, Recorder(oracle(text)), stop_ids={text[6]})
    assert (result.ids, result.steps, result.finish_reason) == ([text[6]], 0, "stop")


def brute_force_lengths(
    text: Sequence[int], guesses: list[list[int]], num_prompt: int, last: int
) -> list[int]:
    """Count, from the final text alone, how many tokens each step's guess should have committed."""
    lengths, anchor = [], num_prompt
    for guess in guesses:
        accepted = 0
        while accepted < len(guess) and guess[accepted] == text[anchor + 1 + accepted]:
            accepted += 1
        lengths.append(min(accepted + 1, last - anchor))
        anchor += lengths[-1]
    return lengths


@pytest.mark.parametrize("seed", range(4))
def test_acceptance_lengths_equal_a_brute_force_count(model, text, seed):
    guesses: list[list[int]] = []
    inner = often_right(text, seed)

    def guess(position: int, num: int) -> list[int]:
        guesses.append(inner(position, num))
        return guesses[-1]

    result = decode(model, PROMPT, Recorder(guess), block_size=5, max_new_tokens=30)
    expected = brute_force_lengths(text, guesses, 6, 6 + 30 - 1)
    # A last block with nothing left to draft does not ask for a guess.
    assert result.acceptance_lengths[: len(expected)] == expected
    assert result.acceptance_lengths[len(expected) :] in ([], [1])
    assert len(set(expected)) > 2  # the sample exercises partial acceptance


@torch.inference_mode()
def teacher_forced_features(model, ids: Sequence[int]) -> torch.Tensor:
    hidden = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([hidden[layer_id + 1][0] for layer_id in LAYER_IDS], dim=-1)


@pytest.mark.parametrize("seed", range(3))
def test_proposer_sees_the_features_of_exactly_the_positions_before_the_anchor(model, text, seed):
    recorder = Recorder(often_right(text, seed))
    result = decode(model, PROMPT, recorder, block_size=5, max_new_tokens=31)
    final = [*PROMPT, *result.ids]
    for anchor_id, position, _, num_context in recorder.calls:
        assert num_context == position
        assert final[position] == anchor_id
    assert [len(f) for f in recorder.features] == [6, *result.acceptance_lengths]
    features_TF = torch.cat(recorder.features)
    assert features_TF.shape == (len(final) - 1, len(LAYER_IDS) * HIDDEN)
    expected_TF = teacher_forced_features(model, final)[:-1]
    scale = float(expected_TF.abs().max())
    torch.testing.assert_close(features_TF / scale, expected_TF / scale, atol=1e-5, rtol=1e-5)


def test_hooks_are_gone_afterwards_even_if_the_proposer_fails(model):
    def fail(position: int, num: int) -> list[int]:
        raise ZeroDivisionError

    before = [len(layer._forward_hooks) for layer in model.model.layers]
    with pytest.raises(ZeroDivisionError):
        decode(model, PROMPT, Recorder(fail))
    assert [len(layer._forward_hooks) for layer in model.model.layers] == before


def test_identical_texts_are_identical_in_any_dtype(model):
    for dtype in (torch.float32, torch.bfloat16):
        assert compare_with_greedy(model, [1], [2, 3], [2, 3], dtype) == Equality(kind="identical")


def test_any_difference_in_float32_is_an_error_naming_position_and_tokens(model):
    with pytest.raises(
        DecodeMismatchError, match=r"\[7, 9\].*new token 1.*token 3, plain greedy 4"
    ):
        compare_with_greedy(model, [7, 9], [2, 3, 5], [2, 4, 5], torch.float32)


@pytest.mark.parametrize(("spec", "greedy"), [([2, 3], [2, 3, 4]), ([2, 3, 4], [2])])
def test_text_ending_inside_the_other_is_an_error(model, spec, greedy):
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(DecodeMismatchError, match="ended after"):
            compare_with_greedy(model, [7], spec, greedy, dtype)


@pytest.fixture
def crafted(model):
    """A bf16 model whose logits at every position are a chosen vector: the head becomes a bias."""

    def make(logits: dict[int, float]):
        logits_V = torch.full((VOCAB,), -50.0)
        for token_id, value in logits.items():
            logits_V[token_id] = value
        torch.manual_seed(0)
        crafted_model = LlamaForCausalLM(model.config).eval().bfloat16()
        head = torch.nn.Linear(HIDDEN, VOCAB, bias=True).bfloat16()
        with torch.no_grad():
            head.weight.zero_()
            head.bias.copy_(logits_V)
        crafted_model.lm_head = head
        return crafted_model

    return make


# bf16 keeps 8 bits: between 8 and 16 one ulp is 1/16, between 16 and 32 it is 1/8.
@pytest.mark.parametrize(
    ("larger", "smaller", "gap"),
    [(12.0, 12.0, 0), (12.0, 11.9375, 1), (12.0, 11.875, 2), (16.0, 15.75, 2)],
)
def test_bf16_gap_of_up_to_two_ulp_is_a_tie(crafted, larger, smaller, gap):
    model = crafted({3: larger, 4: smaller})
    expected = Equality(kind="tie", position=1, gap_ulp=gap)
    assert compare_with_greedy(model, [7], [2, 3, 5], [2, 4], torch.bfloat16) == expected
    assert compare_with_greedy(model, [7], [2, 4, 5], [2, 3], torch.bfloat16) == expected


@pytest.mark.parametrize(
    ("larger", "smaller"), [(12.0, 11.8125), (16.0, 15.5), (float("nan"), 1.0)]
)
def test_bf16_gap_of_more_than_two_ulp_is_an_error(crafted, larger, smaller):
    with pytest.raises(DecodeMismatchError, match=r"ulp of torch\.bfloat16 apart"):
        compare_with_greedy(crafted({3: larger, 4: smaller}), [7], [2, 3], [2, 4], torch.bfloat16)


def test_ulp_is_that_of_the_larger_magnitude():
    assert ulp_gap(1.0, 1.0 + 2**-7, torch.bfloat16) == 1
    assert ulp_gap(-4.0, -3.96875, torch.bfloat16) == 1
    assert ulp_gap(0.0, 0.0, torch.bfloat16) == 0
    assert ulp_gap(1.0, 1.0 + 2**-9, torch.float16) == 2


def test_bf16_speculative_text_is_greedy_up_to_ties(model):
    bf16_model = LlamaForCausalLM(model.config).bfloat16().eval()
    bf16_model.load_state_dict(model.state_dict())
    greedy = plain_greedy(bf16_model, PROMPT, 30, ())
    guess = often_right([*PROMPT, *greedy], 1)
    result = decode(bf16_model, PROMPT, Recorder(guess), max_new_tokens=30)
    equality = compare_with_greedy(bf16_model, PROMPT, result.ids, greedy, torch.bfloat16)
    assert equality.kind in ("identical", "tie")
