"""Batched decoding with refill against one prompt at a time with transformers' own `generate`."""

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hscache.errors import UnsupportedTargetError
from hscache.slot_decode import Request, choose_tokens, decode_slots, row_generator

VOCAB = 61


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.3, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


LENGTHS = [3, 40, 1, 7, 90, 2, 5, 33, 160, 4, 1, 12]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    return [
        Request(key=f"row {i}", prompt_ids=torch.randint(VOCAB, (n,), generator=generator).tolist())
        for i, n in enumerate(LENGTHS)
    ]


def decode(model, requests, **kwargs) -> dict[str, list[int]]:
    settings = {
        "batch_size": 3,
        "max_new_tokens": 24,
        "temperature": 0.0,
        "seed": 0,
        "stop_ids": {7, 19},
    }
    answers = list(decode_slots(model, requests, **{**settings, **kwargs}))
    assert len({a.key for a in answers}) == len(answers)
    for answer in answers:
        stop_ids = {**settings, **kwargs}["stop_ids"]
        assert (answer.finish_reason == "stop") == (answer.ids[-1] in stop_ids)
        assert not set(answer.ids[:-1]) & stop_ids
    return {a.key: a.ids for a in answers}


@torch.inference_mode()
def alone(model, request: Request, max_new_tokens: int = 24) -> list[int]:
    ids = torch.tensor([request.prompt_ids])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=[7, 19],
    )
    return output[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_batched_greedy_with_refill_equals_one_by_one_generate(model, requests, batch_size):
    expected = {request.key: alone(model, request) for request in requests}
    assert decode(model, requests, batch_size=batch_size) == expected
    num_tokens = {len(ids) for ids in expected.values()}
    assert len(num_tokens) > 3  # rows end at different times, so slots really are refilled


def test_answers_of_one_token_free_their_slot_at_once(model, requests):
    expected = {request.key: alone(model, request)[:1] for request in requests}
    assert decode(model, requests, max_new_tokens=1) == expected
    every_token_stops = set(range(VOCAB))
    assert decode(model, requests, stop_ids=every_token_stops) == expected


def test_requests_are_read_only_as_slots_become_free(model, requests):
    num_read = itertools.count()

    def counted():
        for request in requests:
            next(num_read)
            yield request

    settings = {"max_new_tokens": 24, "temperature": 0, "seed": 0, "stop_ids": {7, 19}}
    answers = decode_slots(model, counted(), batch_size=3, **settings)
    for num_answers, _ in enumerate(answers, start=1):
        assert int(repr(num_read)[6:-1]) <= num_answers - 1 + 3


def test_sample_of_a_row_does_not_depend_on_its_neighbours(model, requests):
    settings = {"temperature": 0.9, "seed": 5}
    together = decode(model, requests, **settings)
    assert decode(model, requests[::-1], batch_size=5, **settings) == together
    for request in requests[:4]:
        assert decode(model, [request], **settings) == {request.key: together[request.key]}


def test_sample_depends_on_seed_and_row(model, requests):
    first = decode(model, requests, temperature=0.9, seed=5)
    assert decode(model, requests, temperature=0.9, seed=6) != first
    same_prompt = [Request(key=str(i), prompt_ids=requests[0].prompt_ids) for i in range(4)]
    assert len({tuple(ids) for ids in decode(model, same_prompt, temperature=0.9).values()}) > 1


def test_step_callback_counts_every_token_and_can_stop_the_decoding(model, requests):
    steps: list[int] = []
    answers = decode(model, requests, on_step=steps.append)
    assert sum(steps) == sum(len(ids) for ids in answers.values())

    def stop(num_tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode(model, requests, on_step=stop)


def test_sampled_frequencies_follow_the_softmax():
    logits_V = torch.tensor([0.0, 1.0, -1.0, 2.0, -float("inf")])
    num_samples = 4000
    generators = [row_generator(0, str(i)) for i in range(num_samples)]
    tokens = choose_tokens(logits_V.expand(num_samples, -1), 0.7, generators)
    share_V = torch.bincount(torch.tensor(tokens), minlength=5) / num_samples
    probability_V = (logits_V / 0.7).softmax(-1)
    assert (share_V - probability_V).abs().max() < 0.03  # four standard deviations
    assert share_V[4] == 0


def test_target_with_a_sliding_window_is_refused_by_name(requests):
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    with pytest.raises(UnsupportedTargetError, match="DynamicSlidingWindowLayer"):
        decode(MistralForCausalLM(config).eval(), requests)
