"""Load targets and tokenizers with transformers, and refuse at the door what cannot be used.

Takes a `TargetConfig` or a path; hands on configs, models and tokenizers. The many ways in which
loading fails become one `ConfigError` that names the cause.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hscache.config import TargetConfig, spaced_layer_ids
from hscache.errors import ConfigError, UnsupportedTargetError
from hscache.template_kwargs import parse_template_kwargs, set_template_kwargs

_FULL_ATTENTION = {"full_attention", "attention"}
_HYBRID_TYPES = {"qwen3_5", "qwen3_5_text"}
"""Model types whose linear attention layers can be packed, see hscache.delta_net (Qwen3.5, 3.6)."""
_NOT_WANTED = re.compile(r"lm_head\.|mtp\.|model\.visual\.|.*\.rotary_emb\.inv_freq$")
"""Weights a text model may leave unread: untied copies of a tied head, extra prediction blocks, the
vision tower, and buffers that old checkpoints stored."""
_BLOCK = re.compile(r"(\w+)\.(?:language_model\.)?(?:layers|blocks|h)\.(\d+)\.")
_ROPE_OF_THE_WHOLE_PACK = {"longrope", "dynamic"}
"""Rotary embeddings that look at the largest position of a forward pass: documents would meet."""


def load_config(config: TargetConfig) -> tuple[Any, str]:
    """Return the target's text config and its resolved commit ("" for a folder).

    Raises UnsupportedTargetError for an architecture that cannot be captured.
    """
    full = load_pretrained(AutoConfig, config.path, **pretrained_options(config))
    text = full.get_text_config()
    _refuse_unsupported(text)
    return text, getattr(full, "_commit_hash", None) or ""


def load_tokenizer(config: TargetConfig, revision: str = "") -> Any:
    """Return the target's tokenizer, with the variables of its chat template set.

    Raises ConfigError unless it is a fast one and has a chat template.
    """
    options = pretrained_options(config, revision)
    tokenizer = load_pretrained(AutoTokenizer, config.path, **options)
    if not (tokenizer.is_fast and tokenizer.chat_template):
        lacks = "chat template" if tokenizer.is_fast else "tokenizer.json (a fast tokenizer)"
        raise ConfigError(
            f"the tokenizer of the target {config.path!r} has no {lacks}, without which "
            "conversations cannot become tokens. Use an instruction-tuned target, or add the file "
            "to its folder."
        )
    set_template_kwargs(tokenizer, parse_template_kwargs(config.chat_template_kwargs))
    return tokenizer


def pretrained_options(config: TargetConfig, revision: str = "") -> dict[str, Any]:
    """Return what every from_pretrained call of a target is given.

    `revision` is the commit the config resolved to: a branch may move between two downloads.
    """
    return {
        "revision": revision or config.revision,
        "trust_remote_code": config.trust_remote_code,
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' load reports and bars off the terminal; its errors still raise."""
    logs = transformers.utils.logging
    verbosity, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()


def load_pretrained(loader: Any, path: str, **options: Any) -> Any:
    """Load a part of a pretrained model; its many errors become one ConfigError, with the cause.

    Code that comes with a model runs only if `options` say so; nobody is asked.
    """
    try:
        with _quiet():
            return loader.from_pretrained(path, **{"trust_remote_code": False, **options})
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"the target {path!r} cannot be loaded: {_what_is_wrong(path, loader, error)}. "
            "Expected a Hugging Face id, or a folder with config.json, safetensors weights and a "
            "tokenizer."
        ) from error


def _what_is_wrong(path: str, loader: Any, error: Exception) -> str:
    """Say which part of a folder is missing, for transformers speaks of the consequences."""
    if "trust_remote_code" in str(error):
        return (
            "it brings code of its own, which is not run unless you say so: read it, then set "
            "trust_remote_code of `produce` or `import`; the other commands never run it"
        )
    folder = Path(path)
    if folder.is_dir():
        needed = {AutoTokenizer: "tokenizer.json", AutoModelForCausalLM: "*.safetensors"}
        wanted = ("config.json", needed.get(loader, "config.json"))
        if lacking := [name for name in dict.fromkeys(wanted) if not any(folder.glob(name))]:
            return f"the folder has no {', no '.join(lacking)}"
    elif folder.exists():
        return "it is a file, not a folder"
    elif path.startswith(("/", ".", "~")):
        return "there is no such folder"
    lines = str(error).strip().splitlines() or [""]
    what = f"{loader.__name__}: {type(error).__name__}: {lines[0].rstrip('.')[:400]}"
    return what if folder.is_dir() else f"there is no such folder here, and as a Hub id: {what}"


def load_model(path: str, **options: Any) -> Any:
    """Load a causal LM from safetensors; ConfigError also if weights are missing or do not fit."""
    model, info = load_pretrained(
        AutoModelForCausalLM,
        path,
        use_safetensors=True,  # no pickles
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # transformers would name them in a report, not in the error
        **options,
    )
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ConfigError(
            f"the target {path!r} has {len(mismatched)} weights that do not fit its config.json: "
            f"{name} is {list(found)}, expected {list(expected)}. Use the config.json that came "
            "with the weights."
        )
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"the target {path!r} lacks {len(missing)} weights of the model its config.json "
            f"describes, {missing[0]} for one; they would be random numbers. Complete the folder."
        )
    if unexpected := [k for k in sorted(info["unexpected_keys"]) if not _is_left_out(k, model)]:
        named = ", ".join(unexpected[:3]) + (", ..." if len(unexpected) > 3 else "")
        raise ConfigError(
            f"the target {path!r} has {len(unexpected)} weights that the model its config.json "
            f"describes does not read: {named}. Its states would not be those of the model that "
            "was trained. Use the config.json that came with the weights; quantised copies (names "
            "with scale) are not supported, use the bf16 checkpoint."
        )
    rotary = {n: b.dtype for n, b in model.named_buffers() if n.endswith("inv_freq")}
    assert set(rotary.values()) <= {torch.float32}, f"rotary frequencies lost precision: {rotary}"
    return model


def _is_left_out(name: str, model: Any) -> bool:
    """Tell whether a text model, cut after its last block, is right not to read a weight."""
    if _NOT_WANTED.match(name):
        return True
    block = _BLOCK.match(name)
    return (
        block is not None
        and block[1] == model.base_model_prefix
        and int(block[2]) >= int(model.config.num_hidden_layers)
    )


def is_hybrid(config: Any) -> bool:
    """Tell whether a config is of a type that mixes delta-net and attention layers."""
    return config.model_type in _HYBRID_TYPES


def find_stop_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return the ids that end an answer: the model's and tokenizer's, ChatML's <|im_end|>."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    stop_ids = set(configured if isinstance(configured, list) else [configured])
    stop_ids |= {tokenizer.eos_token_id, tokenizer.get_vocab().get("<|im_end|>")}
    return {stop_id for stop_id in stop_ids if stop_id is not None}


def check_layer_ids(config: TargetConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers to capture; raise ConfigError unless the target is deep enough for them."""
    ids = config.target_layer_ids or spaced_layer_ids(num_layers, config.num_features)
    # The last block's output exists only after the final norm in serving engines (dflash.md 1.3).
    bad = [i for i in ids if not 0 <= i < num_layers - 1]
    if bad or list(ids) != sorted(set(ids)):
        raise ConfigError(
            f"target.target_layer_ids {list(ids)} is not usable: expected increasing block numbers "
            f"from 0 to {num_layers - 2} (the target has {num_layers} blocks; the output of the "
            "last one cannot be captured by serving engines)."
        )
    return tuple(ids)


def _refuse_unsupported(config: Any) -> None:
    known = _FULL_ATTENTION | ({"linear_attention"} if is_hybrid(config) else set())
    kinds = set(getattr(config, "layer_types", None) or ()) - known
    if kinds:
        raise unsupported(config, f"it has {', '.join(sorted(kinds))} layers")
    rope = getattr(config, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type", "default")) in _ROPE_OF_THE_WHOLE_PACK:
        raise unsupported(config, f"its {kind} rotary angles depend on the longest input of a pass")
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        raise unsupported(config, f"it attends through a sliding window of {window}")


def unsupported(config: Any, why: str) -> UnsupportedTargetError:
    """Return the error that refuses an architecture by name."""
    return UnsupportedTargetError(
        f"targets of type {config.model_type!r} are not supported yet: {why}. Supported are "
        "full-attention decoders of transformers (Llama, SmolLM2, Qwen2, Qwen3, ...) and the "
        "hybrids of Qwen3.5 and 3.6."
    )


def library_versions() -> dict[str, str]:
    """Return the versions that decide what a forward computes."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}
