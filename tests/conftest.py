"""Shared fixtures: tiny random targets saved as folders, a tiny corpus, and caches made of them.

Everything is made on the spot from seeds: no network, nothing outside the repository.
"""

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes that share the cores: more threads in each would only wait for one another, which
    # makes the tests eight times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 259  # three special tokens and the 256 bytes


def byte_tokenizer():
    """A byte-level tokenizer without merges: one token per byte, ids 3 + rank of the byte."""
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|im_end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def save_target(folder: Path, model_type: str, **changes) -> Path:
    """Save a random model of a transformers type with the byte tokenizer; return the folder."""
    import torch
    import transformers

    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "initializer_range": 0.2,  # so that attention matters
    }
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **changes})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _no_log_handler_is_left():
    """The command line logs to the stderr of its time, which a test's end closes."""
    yield
    root = logging.getLogger()
    for handler in [h for h in root.handlers if type(h).__module__ == "hscache.progress"]:
        root.removeHandler(handler)


@pytest.fixture(scope="session")
def pool():
    """Three gloo processes; they start when the first test asks for them."""
    from rank_pool import RankPool

    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory) -> Path:
    """A random Llama: 5 blocks, hidden 64, grouped heads, tied head."""
    return save_target(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory) -> Path:
    """A random Qwen3: 5 blocks, hidden 64, head norms, a head of its own."""
    return save_target(tmp_path_factory.mktemp("qwen3"), "qwen3", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tokenizer(llama_dir):
    """The tokenizer the tiny targets are saved with."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(llama_dir)


def conversation(question: str, answer: str) -> dict:
    """One row of input."""
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages}


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory) -> Path:
    """40 short conversations of different lengths, in JSONL."""
    rng = np.random.default_rng(7)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    rows = [
        conversation(
            " ".join(rng.choice(words, 2)) + f" {i}?",
            " ".join(rng.choice(words, int(rng.integers(2, 9)))) + f" {i}.",
        )
        for i in range(40)
    ]
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "train.jsonl", rows)
