"""Code that comes with a model runs when the user says so, is recorded, and at no other time."""

import json
import shutil
import sys

import pytest
import transformers
from conftest import conversation, write_jsonl
from producer import command
from trainer_cache import fit_config

import hscache
from hscache import cli
from trainer.cli import main as trainer
from trainer.fit import fit

REMOTE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM

pathlib.Path({marker!r}).touch()


class Config(LlamaConfig):
    model_type = "llama_of_its_own"


class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture
def marker(tmp_path):
    """Appears when the model's code has run."""
    return tmp_path / "ran"


@pytest.fixture
def target(llama_dir, tmp_path, marker, monkeypatch):
    """A target whose config and model are code in its folder; nobody is there to be asked."""
    folder = shutil.copytree(llama_dir, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "llama_of_its_own", "architectures": ["Model"]}
    config["auto_map"] = {"AutoConfig": "remote.Config", "AutoModelForCausalLM": "remote.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "remote.py").write_text(REMOTE.format(marker=str(marker)))
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a terminal would be asked"))
    return folder


def test_code_of_a_model_runs_only_with_the_flag_and_a_cache_never_sets_it(
    target, marker, corpus_file, tmp_path, capsys
):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [conversation("alpha?", "")])
    produce = command(tmp_path / "cache", target, corpus_file)[3:]
    answer = [
        "regenerate", f"--target={target}", f"--prompts={prompts}", "--device=cpu",
        f"--output={tmp_path / 'answers.jsonl'}", "--max-new-tokens=2",
    ]  # fmt: skip
    for line in (produce, answer):
        assert cli.main(line) == 2
        assert "trust_remote_code" in capsys.readouterr().err
        assert not marker.exists()

    assert cli.main([*produce, "--target.trust-remote-code", "true"]) == 0
    assert marker.exists()
    states = hscache.open(tmp_path / "cache").identity.states
    assert states.trust_remote_code

    marker.unlink()
    for name in [name for name in sys.modules if name.startswith("transformers_modules.")]:
        del sys.modules[name]
    fit(fit_config(tmp_path / "cache", tmp_path / "run", passes=1, row_tokens=256,
                   drafter={"mask_token_id": 10}))  # fmt: skip
    line = ["eval", f"--checkpoint={tmp_path / 'run'}", f"--shards={tmp_path / 'cache'}"]
    assert trainer([*line, f"--prompts={prompts}", "--device=cpu"]) == 2
    assert "trust_remote_code" in capsys.readouterr().err
    assert not marker.exists()
