"""`trainer eval` on a tiny random Llama: the table, the JSON, and which targets are refused."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import conversation, write_jsonl
from safetensors.torch import load_file, save_file
from trainer_cache import documents, fit_config, make_cache

from hscache import config as hs
from hscache.errors import CacheMismatchError, ConfigError
from hscache.produce import produce
from hscache.reader import open_cache
from hscache.zarr_array import canonical_json, checksum_hex
from trainer import cli
from trainer.config import EvalConfig
from trainer.decode_prompts import _require_frozen
from trainer.evaluate import run
from trainer.fit import fit
from trainer.frozen import load_frozen
from trainer.run_folder import STATE, list_checkpoints

CPU = torch.device("cpu")
LAYER_IDS = (0, 1, 3)


@pytest.fixture(scope="module")
def trained(llama_dir, corpus_file, tmp_path_factory):
    """A cache made by the producer in fp32, and a run on it."""
    base = tmp_path_factory.mktemp("evaluate")
    produce(
        hs.ProduceConfig(
            shard_dir=base / "cache",
            target=hs.TargetConfig(
                path=str(llama_dir), target_layer_ids=LAYER_IDS, dtype="float32", device="cpu"
            ),
            data=hs.DataConfig(train=(str(corpus_file),), held_out_fraction=0.15, max_tokens=256),
            store=hs.StoreConfig(shard_tokens=600, threads=1),
            token_budget=512,
        )
    )
    fit(fit_config(base / "cache", base / "run", row_tokens=256, anchors_per_row=32,
                   drafter={"mask_token_id": 10}, passes=4))  # fmt: skip
    prompts = [conversation(f"alpha {i}?", "") for i in range(4)]
    write_jsonl(base / "prompts.jsonl", prompts)
    return base


def config_of(base, **changes) -> EvalConfig:
    return EvalConfig(
        **{
            "checkpoint": base / "run",
            "shards": base / "cache",
            "prompts": (str(base / "prompts.jsonl"),),
            "max_new_tokens": 12,
            "max_prompts": 3,
            "device": "cpu",
            **changes,
        }
    )


def test_table_and_json_say_the_same(trained, tmp_path, capsys):
    file = tmp_path / "new" / "eval.json"
    assert run(config_of(trained, json=file)) == 0
    output, record = capsys.readouterr().out, json.loads(file.read_text())
    assert list(record["results"]) == [
        "drafter", "bigram table", "trigram table", "4-gram table", "prompt look-up",
    ]  # fmt: skip
    for name, figures in record["results"].items():
        line = next(x for x in output.splitlines() if x.startswith(f"{name} "))
        shown = line.removeprefix(name).split()
        for column, text in zip(
            ("sequential", "dense", "per_document_mean", "decoded"), shown, strict=True
        ):
            assert f"{figures[column]:.3f}" == text
            assert 1 <= figures[column] <= 4
    held_out = open_cache(trained / "cache").held_out
    assert record["num_documents"] == len(held_out) > 0
    assert record["num_missing"] == 0
    assert record["num_prompts"] == 3
    assert record["identical_to_greedy"] == 3
    assert "3 of 3" in output
    assert 1 <= record["tokens_per_target_step"] <= 4
    assert record["config"]["max_new_tokens"] == 12
    tables = [v["sequential"] for k, v in record["results"].items() if k.endswith("table")]
    ours = record["results"]["drafter"]["sequential"]
    assert record["ratio_to_best_table"] == pytest.approx(ours / max(tables))


def test_without_prompts_and_tables_only_the_drafter_is_measured(trained, tmp_path):
    file = tmp_path / "eval.json"
    run(config_of(trained, prompts=(), tables=False, json=file))
    record = json.loads(file.read_text())
    assert list(record["results"]) == ["drafter"]
    assert record["results"]["drafter"]["decoded"] is None
    assert "ratio_to_best_table" not in record
    assert "tokens_per_target_step" not in record


def test_bf16_runs_and_counts_ties_apart(trained, tmp_path):
    file = tmp_path / "eval.json"
    run(config_of(trained, dtype="bfloat16", tables=False, json=file))
    record = json.loads(file.read_text())
    assert record["identical_to_greedy"] + record["ties"] == 3


def test_dry_run_measures_nothing(trained, tmp_path, capsys):
    file = tmp_path / "eval.json"
    assert run(config_of(trained, json=file), dry_run=True) == 0
    assert not file.exists()
    assert "held-out documents" in capsys.readouterr().out


def test_moved_target_is_found_with_a_flag(trained, llama_dir, tmp_path):
    shutil.copytree(llama_dir, tmp_path / "moved")
    run(config_of(trained, target=str(tmp_path / "moved"), tables=False, max_prompts=1))


def test_weights_of_another_target_are_refused(trained, llama_dir, qwen3_dir, tmp_path):
    with pytest.raises(CacheMismatchError, match="not those the cache"):
        run(config_of(trained, target=str(qwen3_dir), tables=False))
    tuned = tmp_path / "tuned"
    shutil.copytree(llama_dir, tuned)
    weights = load_file(tuned / "model.safetensors")
    weights["model.layers.4.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, tuned / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CacheMismatchError, match="not those the cache"):
        run(config_of(trained, target=str(tuned), tables=False))


def test_hub_target_is_told_apart_by_its_embedding(trained):
    cache = open_cache(trained / "cache")
    frozen = load_frozen(cache).to(CPU, torch.float32)

    def target(weight):
        return SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=weight))

    _require_frozen(target(frozen.embedding_VH.clone()), frozen, "org/model", cache)
    _require_frozen(target(frozen.embedding_VH.bfloat16()), frozen, "org/model", cache)
    for other in (frozen.embedding_VH * 1.5, frozen.embedding_VH[:-1]):
        with pytest.raises(CacheMismatchError, match="org/model has another embedding"):
            _require_frozen(target(other), frozen, "org/model", cache)


def test_drafter_of_another_cache_is_refused(trained, tmp_path):
    other = make_cache(tmp_path / "other", documents([30] * 4, held_out=(0,)))
    with pytest.raises(CacheMismatchError, match=r"hidden_size 64, .* has 32"):
        run(config_of(trained, shards=other))


def test_held_out_documents_without_states_are_left_out_and_counted(tmp_path, capsys):
    corpus = documents([30] * 8, held_out=(0, 1, 2, 3, 4))
    plan = open_cache(make_cache(tmp_path / "p", corpus, leave_out=range(9))).plan
    assert list(plan.held_out_shards) == [0, 1]
    cache = make_cache(tmp_path / "c", corpus, quarantine=(1,), leave_out=(1,))
    fit(fit_config(cache, tmp_path / "run"))
    run(EvalConfig(checkpoint=tmp_path / "run", shards=cache, device="cpu",
                   json=tmp_path / "e.json"))  # fmt: skip
    record = json.loads((tmp_path / "e.json").read_text())
    assert (record["num_documents"], record["num_missing"]) == (3, 2)
    assert "2 more have no states" in capsys.readouterr().out


def test_nothing_to_measure_on_is_refused(tmp_path):
    cache = make_cache(tmp_path / "c", documents([30] * 4))
    fit(fit_config(cache, tmp_path / "run"))
    with pytest.raises(ConfigError, match="nothing to measure on"):
        run(EvalConfig(checkpoint=tmp_path / "run", shards=cache, device="cpu"))


def test_command_line_runs(trained, capsys):
    flags = ["--checkpoint", trained / "run", "--shards", trained / "cache", "--device", "cpu"]
    assert cli.main(["eval", *map(str, flags)]) == 0
    assert "acceptance length" in capsys.readouterr().out
    assert cli.main(["eval", *map(str, flags), "--max-prompts", "0"]) == 2
    flags[1] = trained / "nowhere"
    assert cli.main(["eval", *map(str, flags)]) == 2
    assert "neither a checkpoint" in capsys.readouterr().err


def test_a_cache_of_other_states_is_refused_and_other_documents_are_said(trained, tmp_path, caplog):
    checkpoint = list_checkpoints(trained / "run")[-1]
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    sealed = json.loads((copy / STATE).read_text())

    def store(part, name, value):
        record = json.loads(json.dumps({k: v for k, v in sealed.items() if k != "crc32c"}))
        record["cache"][part][name] = value
        seal = {**record, "crc32c": checksum_hex(canonical_json(record))}
        (copy / STATE).write_bytes(canonical_json(seal))

    store("states", "weights_sha256", "0" * 64)
    with pytest.raises(CacheMismatchError, match="weights_sha256: trained on '0000"):
        run(config_of(trained, checkpoint=copy))
    store("content", "corpus_sha256", "0" * 64)
    assert run(config_of(trained, checkpoint=copy, prompts=(), tables=False)) == 0
    assert "may have been trained on" in caplog.text
    (copy / STATE).unlink()
    assert run(config_of(trained, checkpoint=copy, prompts=(), tables=False)) == 0
    assert "does not say which cache" in caplog.text


def test_a_target_with_the_same_weights_and_another_config_or_template_is_refused(
    trained, llama_dir, tmp_path
):
    folder = shutil.copytree(llama_dir, tmp_path / "target")

    def change(name, edit, what):
        path = folder / name
        original = path.read_text()
        path.write_text(edit(original))
        with pytest.raises(CacheMismatchError, match=what):
            run(config_of(trained, target=str(folder), tables=False))
        path.write_text(original)

    def other(**values):
        return lambda text: json.dumps({**json.loads(text), **values})

    change("config.json", other(rms_norm_eps=0.01), "the config of")
    change("chat_template.jinja", lambda text: text + "{# another #}", "the chat template of")
    cut = {"direction": "Right", "max_length": 99, "strategy": "LongestFirst", "stride": 0}
    change("tokenizer.json", other(truncation=cut), "the tokenizer of")
    assert run(config_of(trained, target=str(folder), tables=False)) == 0
