"""Decoding of a tiny random hybrid in fp32, one by one, speculatively and in slots, against a loop
without any cache; and the commands that decode, on its multimodal checkpoint."""

import json
import random

import pytest
import torch
from conftest import byte_tokenizer, conversation, write_jsonl
from hybrid_maker import TEXT, VISION, tiny_hybrid, with_slow_decay
from test_decode import Recorder, first_seen, oracle, slow_greedy
from trainer_cache import fit_config
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

from hscache import config as hs
from hscache import kv_cache
from hscache.produce import produce
from hscache.regenerate import regenerate, run
from hscache.regenerate_config import RegenerateConfig
from hscache.slot_decode import Request, decode_slots
from trainer.config import EvalConfig
from trainer.decode import plain_greedy, speculative_decode
from trainer.evaluate import run as evaluate
from trainer.fit import fit

LAYER_IDS = (0, 3, 2)  # not sorted: the order of the features is the caller's
NUM_NEW = 32
VOCAB = TEXT["vocab_size"]
RNG = random.Random(7)
PROMPTS = [[RNG.randrange(VOCAB) for _ in range(n)] for n in (1, 3, 6, 64, 90)]


@pytest.fixture(scope="module")
def model():
    return tiny_hybrid()


@pytest.fixture(scope="module")
def answers(model) -> list[list[int]]:
    return [slow_greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]


def guesses(text, share: float, seed: int):
    """Drafts of which `share` are right; always the same ones at a position."""

    def guess(position: int, num: int) -> list[int]:
        rng = random.Random(f"{seed} {position}")
        right = oracle(text)(position, num)
        return [t if rng.random() < share else rng.randrange(VOCAB) for t in right]

    return guess


def decode(model, prompt, recorder, **changes):
    settings = {"block_size": 8, "max_new_tokens": NUM_NEW, "stop_ids": ()}
    return speculative_decode(
        model, prompt, recorder, target_layer_ids=LAYER_IDS, **{**settings, **changes}
    )


def test_plain_greedy_equals_the_loop_without_cache(model, answers):
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    assert all(len(set(answer)) > 20 for answer in answers)  # texts that do not repeat themselves
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert plain_greedy(model, prompt, NUM_NEW, ()) == answer


@pytest.mark.parametrize(
    ("block_size", "share"),
    [(1, 1), (2, 0.8), (8, 0), (8, 0.8), (8, 1), (16, 0.8), (64, 0.8), (64, 1)],
)
def test_any_proposer_gives_the_greedy_text(model, answers, block_size, share):
    lengths = []
    for seed, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        recorder = Recorder(guesses(prompt + answer, share, seed))
        result = decode(model, prompt, recorder, block_size=block_size)
        assert result.ids == answer
        assert result.committed == NUM_NEW - 1
        lengths += result.acceptance_lengths
    if share == 0.8 and block_size > 2:
        assert len(set(lengths)) > 3  # the sample exercises partial acceptance
    if share == 1:
        assert max(lengths) == min(block_size, NUM_NEW - 1)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 10])
def test_a_block_longer_than_what_is_left_is_cut(model, answers, max_new_tokens):
    for share in (0.5, 1):
        recorder = Recorder(guesses(PROMPTS[1] + answers[1], share, 0))
        result = decode(model, PROMPTS[1], recorder, block_size=16, max_new_tokens=max_new_tokens)
        assert result.ids == answers[1][:max_new_tokens]
        assert result.finish_reason == "length"


def test_a_stop_token_inside_a_block_ends_the_text(model, answers):
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        stop = first_seen(answer, 11)
        for share in (0.8, 1):
            recorder = Recorder(guesses(prompt + answer, share, 0))
            result = decode(model, prompt, recorder, stop_ids={answer[stop]})
            assert result.ids == answer[: stop + 1]
            assert result.ids == plain_greedy(model, prompt, NUM_NEW, {answer[stop]})
            assert result.finish_reason == "stop"


@torch.inference_mode()
def test_proposer_sees_the_features_of_one_pass_over_the_text(model, answers):
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        recorder = Recorder(guesses(prompt + answer, 0.8, 1))
        decode(model, prompt, recorder)
        states = model(
            torch.tensor([prompt + answer]), use_cache=False, output_hidden_states=True
        ).hidden_states
        for found, layer_id in zip(
            torch.cat(recorder.features).split(TEXT["hidden_size"], -1), LAYER_IDS, strict=True
        ):
            expected = states[layer_id + 1][0, :-1]
            assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.inference_mode()
def test_bf16_text_is_greedy_up_to_the_rounding_of_decoding_without_drafts(model):
    bf16_model = Qwen3_5ForCausalLM(model.config).eval()
    bf16_model.load_state_dict(model.state_dict())
    for part in bf16_model.model.layers, bf16_model.model.embed_tokens, bf16_model.lm_head:
        part.bfloat16()  # the rotary frequencies stay fp32
    for prompt in PROMPTS:
        greedy = plain_greedy(bf16_model, prompt, NUM_NEW, ())
        found = decode(bf16_model, prompt, Recorder(guesses(prompt + greedy, 0.8, 2))).ids
        differing = [i for i, (a, b) in enumerate(zip(found, greedy, strict=True)) if a != b]
        if not differing:
            continue
        first = differing[0]
        text = torch.tensor([prompt + greedy[:first]])
        one_pass_V = bf16_model(text, use_cache=False).logits[0, -1]
        cache = kv_cache.new_cache(bf16_model)
        argument = {**kv_cache.as_argument(bf16_model, cache), "use_cache": True}
        step_V = bf16_model(text[:, : len(prompt)], **argument).logits[0, -1]
        for token in text[0, len(prompt) :]:
            step_V = bf16_model(token.view(1, 1), **argument).logits[0, -1]
        gap = (one_pass_V[greedy[first]] - one_pass_V[found[first]]).abs()
        assert gap <= 2 * (one_pass_V - step_V).abs().max()


def test_slots_of_different_lengths_give_what_each_prompt_gives_alone(model, answers):
    """Refilled slots too: seven prompts of five texts for at most three slots."""
    stop_ids = {answers[1][first_seen(answers[1], 4)], answers[3][first_seen(answers[3], 9)]}
    prompts = [*PROMPTS, PROMPTS[0][:1], PROMPTS[4][:50]]
    expected = {str(i): plain_greedy(model, p, NUM_NEW, stop_ids) for i, p in enumerate(prompts)}
    assert len({len(ids) for ids in expected.values()}) > 2
    requests = [Request(key=str(i), prompt_ids=p) for i, p in enumerate(prompts)]
    for batch_size in (1, 3, 20):
        found = decode_slots(
            model, requests, batch_size=batch_size, max_new_tokens=NUM_NEW, temperature=0, seed=0,
            stop_ids=stop_ids,
        )  # fmt: skip
        assert {answer.key: answer.ids for answer in found} == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A multimodal checkpoint as published."""
    folder = tmp_path_factory.mktemp("hybrid_decode")
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=TEXT, vision_config=VISION)
    with_slow_decay(Qwen3_5ForConditionalGeneration(config)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def prompts_file(tmp_path):
    rows = [conversation(f"{word}?", "") for word in ("alpha", "beta gamma", "d")]
    return write_jsonl(tmp_path / "prompts.jsonl", rows)


def test_regenerate_answers_with_a_hybrid(checkpoint, prompts_file, tmp_path):
    config = RegenerateConfig(
        target=str(checkpoint), prompts=(str(prompts_file),), output=tmp_path / "answers.jsonl",
        max_new_tokens=8, batch_size=2, device="cpu", dtype="float32",
    )  # fmt: skip
    run(config, dry_run=True)
    assert regenerate(config).num_new_tokens <= 3 * 8
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 3


def test_eval_decodes_with_a_hybrid(checkpoint, prompts_file, corpus_file, tmp_path):
    produce(
        hs.ProduceConfig(
            shard_dir=tmp_path / "cache",
            target=hs.TargetConfig(
                path=str(checkpoint), target_layer_ids=(0, 3, 6), dtype="float32", device="cpu"
            ),
            data=hs.DataConfig(train=(str(corpus_file),), held_out_fraction=0.15, max_tokens=256),
            store=hs.StoreConfig(shard_tokens=600, threads=1),
            token_budget=512,
        )
    )
    fit(fit_config(tmp_path / "cache", tmp_path / "run", row_tokens=256, anchors_per_row=32,
                   drafter={"mask_token_id": 10}, passes=1))  # fmt: skip
    config = EvalConfig(
        checkpoint=tmp_path / "run", shards=tmp_path / "cache", prompts=(str(prompts_file),),
        max_new_tokens=12, device="cpu", json=tmp_path / "eval.json",
    )  # fmt: skip
    assert evaluate(config) == 0
    record = json.loads((tmp_path / "eval.json").read_text())
    assert record["identical_to_greedy"] == record["num_prompts"] == 3
