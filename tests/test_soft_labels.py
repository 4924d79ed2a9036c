"""Soft labels: what the cache stores of the target's last block is what the target itself says."""

import dataclasses
import re
import shutil

import numpy as np
import pytest
import torch
import transformers
from conftest import byte_tokenizer
from hybrid_maker import tiny_hybrid
from producer import command
from trainer_cache import HIDDEN, documents, fit_config, make_cache, metrics_of, random_bits

import hscache
from hscache import cli, layout
from hscache.errors import CacheMismatchError, ConfigError
from hscache.verify import verify
from trainer.batches import Loader
from trainer.config import DrafterShape
from trainer.evaluate import _compare_with_training
from trainer.fit import fit
from trainer.frozen import load_frozen
from trainer.row_loss import row_loss, teacher_hidden
from trainer.run_plan import plan_run
from trainer.run_state import start_training

CPU = torch.device("cpu")
SHAPE = DrafterShape(
    num_hidden_layers=1, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, block_size=4, mask_token_id=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def hybrid_dir(tmp_path_factory):
    """A hybrid, whose final norm multiplies by one plus its weight."""
    folder = tmp_path_factory.mktemp("hybrid")
    tiny_hybrid().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen3", "hybrid"])
def made(request, tmp_path_factory, corpus_file):
    """A target, and a cache of it with last hidden states."""
    target = request.getfixturevalue(f"{request.param}_dir")
    folder = tmp_path_factory.mktemp("soft") / "cache"
    settings = {
        "target__last_hidden": "true", "target__dtype": "float32", "data__max_documents": "6",
    }  # fmt: skip
    assert cli.main(command(folder, target, corpus_file, **settings)[3:]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    return folder, model


@torch.no_grad()
def their_logits(model, document):
    """Logits of the target's own forward, [T, V]."""
    ids = torch.from_numpy(document.input_ids.astype(np.int64))
    return model(ids[None]).logits[0]


def divergence(teacher_TV, logits_TV):
    log_p, log_q = teacher_TV.log_softmax(-1), logits_TV.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def test_logits_from_the_cache_are_the_targets_own(made):
    folder, model = made
    cache = hscache.open(folder)
    frozen = load_frozen(cache).to(CPU, torch.float32)
    for document in cache.documents:
        bits = torch.from_numpy(document.last_hidden().view(np.int16))
        teacher_TV = frozen.final_norm(bits.view(torch.bfloat16)) @ frozen.head_VH.T
        logits_TV = their_logits(model, document)
        assert divergence(logits_TV, teacher_TV).max() < 1e-3  # stored as bfloat16
        top, second = logits_TV.topk(2, -1).values.T
        clear_T = top - second > 0.02 * logits_TV.std(-1)
        assert clear_T.float().mean() > 0.7
        assert torch.equal(teacher_TV.argmax(-1)[clear_T], logits_TV.argmax(-1)[clear_T])


def test_each_slot_is_taught_by_the_position_before_it(made, tmp_path):
    folder, model = made
    config = dataclasses.replace(
        fit_config(folder, tmp_path, loss={"labels": "soft"}, row_tokens=256), drafter=SHAPE
    )
    run = plan_run(config)
    frozen = load_frozen(run.cache).to(CPU, torch.float32)
    loader = Loader(run.cache, run.row_task(), device=CPU, dtype=torch.float32)
    num_predicted, num_slots = SHAPE.block_size - 1, 0
    with loader:
        for batch in loader:
            teacher_MV = teacher_hidden(frozen, batch, num_predicted) @ frozen.head_VH.T
            logits, offset = {}, 0  # of each document, by where it starts in the row
            for row in batch.document_ids:
                logits[offset] = their_logits(model, run.cache.documents[row])
                offset += run.cache.documents[row].num_tokens
            for slot, teacher_V in zip(batch.scored_M.tolist(), teacher_MV, strict=True):
                n, k = slot // num_predicted, slot % num_predicted + 1
                start, end = int(batch.context_start_N[n]), int(batch.context_end_N[n])
                expected_V = logits[start][end - start + k - 1]
                assert divergence(expected_V, teacher_V) < 1e-3
                num_slots += 1
    assert num_slots > 50


def test_a_cache_with_last_hidden_is_not_continued_without(made, corpus_file, capsys):
    folder, model = made
    line = command(folder, model.config._name_or_path, corpus_file, target__dtype="float32",
                   data__max_documents="6")[3:]  # fmt: skip
    assert cli.main(line) == 1
    assert "states.last_hidden: the cache has True, this run False" in capsys.readouterr().err


def test_inspect_shows_the_last_block(made, capsys):
    folder, model = made
    assert cli.main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"last hidden +yes", shown)
    last = model.config.num_hidden_layers - 1
    assert re.search(rf"^ *{last} +\d", shown.split("outlier channels")[1], re.MULTILINE)
    assert cli.main(["inspect", str(folder), "--doc", "0"]) == 0
    assert re.search(rf"^ *{last} +\d", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["verify", str(folder), "--deep"]) == 0


LENGTHS = (9, 30, 17, 24, 28, 12, 30, 21)


@pytest.fixture(scope="module")
def invented(tmp_path_factory):
    """A cache of random states, last hidden ones among them."""

    def bits(row, num_tokens):
        last = random_bits(num_tokens, row + 99)[:, :1]
        return np.concatenate([random_bits(num_tokens, row), last], axis=1)

    folder = tmp_path_factory.mktemp("invented") / "cache"
    return make_cache(folder, documents(LENGTHS, held_out=(0,)), bits=bits, last_hidden=True)


def test_damage_in_the_last_hidden_states_alone_is_found(invented, tmp_path):
    folder = shutil.copytree(invented, tmp_path / "cache")
    path = layout.shard_dir(folder, 1) / "last_hidden_significand" / "c.0.0"
    data = bytearray(path.read_bytes())
    data[5] ^= 0x10
    path.write_bytes(data)
    cache = hscache.open(folder)
    assert verify(cache, deep=False) == []
    (damage,) = verify(cache, deep=True)
    assert "last_hidden_significand" in damage.problem
    path.unlink()
    (damage,) = verify(hscache.open(folder), deep=False)
    assert damage.part == "shard 1"


def test_a_document_with_a_bad_last_state_is_a_bad_document(tmp_path):
    def bits(row, num_tokens):
        states = np.full((num_tokens, 3, HIDDEN), 0x3F80, np.uint16)
        states += np.arange(HIDDEN, dtype=np.uint16)
        states += np.arange(num_tokens, dtype=np.uint16)[:, None, None]
        states[2, 2, 7] = 0x7F80 if row == 1 else 0x3F80
        return states

    folder = make_cache(tmp_path / "cache", documents([9] * 4), bits=bits, last_hidden=True)
    (damage,) = verify(hscache.open(folder), deep=True)
    assert damage.documents == (1,)
    assert "not finite" in damage.problem


def test_row_loss_is_the_weighted_divergence_of_all_scored_slots(invented, tmp_path):
    run = plan_run(fit_config(invented, tmp_path, loss={"labels": "soft"}))
    training = start_training(run, CPU)
    loader = Loader(run.cache, run.row_task(), device=CPU, dtype=torch.float32)
    with loader:
        batch = next(iter(loader))
    found, _ = row_loss(training.drafter, training.frozen, batch, chunk_size=7)
    found.backward()
    grads = [p.grad.clone() for p in training.drafter.parameters()]
    training.drafter.zero_grad()
    frozen, drafter = training.frozen, training.drafter
    kv = drafter.context_kv(batch.features_SF, batch.position_ids_S)
    hidden = drafter(
        frozen.embedding_VH[batch.anchor_ids_N], frozen.embedding_VH[drafter.config.mask_token_id],
        kv, batch.context_start_N, batch.context_end_N,
    ).flatten(0, 1)[batch.scored_M]  # fmt: skip
    teacher_MV = teacher_hidden(frozen, batch, 3) @ frozen.head_VH.T
    expected = (divergence(teacher_MV, hidden @ frozen.head_VH.T) * batch.weights_M).sum()
    expected.backward()
    torch.testing.assert_close(found, expected)
    for grad, parameter in zip(grads, drafter.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [{"labels": "soft"}, {"weighting": "dpace", "gamma": None}])
def test_training_learns_by_heart(invented, tmp_path, loss):
    fit(fit_config(invented, tmp_path / "run", loss=loss, passes=60, optim={"lr": 1e-2}))
    losses = [line["train/loss"] for line in metrics_of(tmp_path / "run")]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4]), losses


def test_soft_labels_are_refused_on_a_cache_that_cannot_give_them(tmp_path):
    folder = make_cache(tmp_path / "cache", documents(LENGTHS))
    with pytest.raises(ConfigError, match=r"loss\.labels soft .*--target\.last-hidden true"):
        plan_run(fit_config(folder, tmp_path, loss={"labels": "soft"}))


def test_a_drafter_is_measured_on_the_same_states_with_or_without_last_hidden(invented, tmp_path):
    checkpoint = fit(fit_config(invented, tmp_path / "run", passes=1))
    plain = make_cache(tmp_path / "plain", documents(LENGTHS, held_out=(0,)))
    _compare_with_training(checkpoint, hscache.open(plain))
    other = make_cache(tmp_path / "other", documents(LENGTHS), dtype="float32")
    with pytest.raises(CacheMismatchError, match="dtype"):
        _compare_with_training(checkpoint, hscache.open(other))
