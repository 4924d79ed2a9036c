"""The frozen target: load it, run packs of documents through it, capture hidden states.

Takes a `TargetConfig`; hands on `Target.capture`, the tokenizer, and what training needs of the
target (embedding, head, final norm). Any full-attention causal LM of transformers works: its
attention is replaced by one that never looks across documents, the model is cut after the last
captured block, and a self-check at load time proves both on the real weights.

Axes: T tokens of a pack, L captured layers, H hidden, D head dim, N heads.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hscache.config import TargetConfig, spaced_layer_ids
from hscache.errors import ConfigError, UnsupportedTargetError
from hscache.zarr_array import canonical_json

ATTENTION = "hscache_packed"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_FULL_ATTENTION = {"full_attention", "attention"}
_NOT_OURS = {"s_aux", "softcap", "sliding_window", "position_bias"}
"""Options of attention functions that change the result and that ours does not know."""


class NotPackableError(Exception):
    """The model calls our attention in a way that ours would answer wrongly."""


@dataclass(frozen=True)
class Pack:
    """Boundaries of the documents of one forward pass, on the host and on the device."""

    offsets: tuple[int, ...]
    cumulative: torch.Tensor
    """the same as int32 on the device, as varlen kernels want it"""

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(b - a for a, b in itertools.pairwise(self.offsets))


def packed_attention(
    module: nn.Module,
    query_1NTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    pack: Pack | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document of a pack; the attention function transformers calls.

    On CUDA in half precision one variable-length flash kernel, elsewhere a plain loop over
    documents. Returns [1, T, N, D].
    """
    if pack is None or attention_mask is not None:
        raise NotPackableError("its code does not hand the packs on to the attention")
    if value_1KTD.shape[-1] != query_1NTD.shape[-1]:
        raise NotPackableError("its keys and values differ in width")
    if more := sorted(name for name in _NOT_OURS if options.get(name) is not None):
        raise NotPackableError(f"its attention uses {', '.join(more)}")
    if query_1NTD.is_cuda and query_1NTD.dtype != torch.float32:
        query_TND, key_TKD, value_TKD = (
            x[0].transpose(0, 1).contiguous() for x in (query_1NTD, key_1KTD, value_1KTD)
        )
        out_TND = torch.ops.aten._flash_attention_forward(
            query_TND,
            key_TKD,
            value_TKD,
            pack.cumulative,
            pack.cumulative,
            pack.longest,
            pack.longest,
            0.0,
            True,
            False,
            scale=scaling,
        )[0]
        return out_TND[None], None
    out_1NTD = torch.empty_like(query_1NTD)
    for start, stop in itertools.pairwise(pack.offsets):
        out_1NTD[:, :, start:stop] = F.scaled_dot_product_attention(
            query_1NTD[:, :, start:stop],
            key_1KTD[:, :, start:stop],
            value_1KTD[:, :, start:stop],
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )
    return out_1NTD.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention)


def choose_device(name: str) -> torch.device:
    """Resolve auto / cpu / cuda; under a launcher cuda means the GPU of LOCAL_RANK."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda, and torch sees no CUDA device; use --target.device cpu.")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


class Target:
    """A loaded, truncated target."""

    def __init__(self, config: TargetConfig) -> None:
        self.device = choose_device(config.device)
        self.dtype = DTYPES[config.dtype]
        self.path = config.path
        self.trust_remote_code = config.trust_remote_code
        self.config, self.revision = load_config(config)
        self.num_target_layers = int(self.config.num_hidden_layers)
        self.layer_ids = check_layer_ids(config, self.num_target_layers)
        self.tokenizer = load_tokenizer(config)
        self.full_config = json.loads(self.config.to_json_string(use_diff=False))

        last = self.layer_ids[-1]
        self.config.num_hidden_layers = last + 1
        if getattr(self.config, "layer_types", None):
            self.config.layer_types = self.config.layer_types[: last + 1]
        self.config.use_cache = False
        model = load_model(
            config.path,
            config=self.config,
            dtype=self.dtype,
            attn_implementation=ATTENTION,
            **_options(config),
        )
        self._base = model.base_model
        layers = getattr(self._base, "layers", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) != last + 1:
            raise _unsupported(self.config, "its decoder blocks are not found at `model.layers`")
        self._layers = layers
        self.frozen = _frozen_tensors(model)
        self._base.norm = nn.Identity()  # never applied to a captured layer
        self._base.to(self.device).eval()
        check_packing(self)

    @torch.inference_mode()
    def capture(self, ids_T: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
        """Return the states of a pack, bfloat16 [T, L, H] on the device.

        `ids_T` int64 token ids, `offsets` the documents' boundaries in it, from 0 to T. States are
        the raw outputs of the blocks in `layer_ids`, before any norm, as if every document ran
        alone.
        """
        ids_T = ids_T.to(self.device)
        lengths = torch.tensor(offsets, device=self.device).diff()
        pack = Pack(tuple(offsets), torch.tensor(offsets, dtype=torch.int32, device=self.device))
        starts_T = torch.repeat_interleave(torch.tensor(offsets[:-1], device=self.device), lengths)
        positions_1T = (torch.arange(len(ids_T), device=self.device) - starts_T)[None]
        states_TLH = torch.empty(
            (len(ids_T), len(self.layer_ids), self.config.hidden_size),
            dtype=torch.bfloat16,
            device=self.device,
        )

        def keep(index: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                states_TLH[:, index] = hidden[0]

            return hook

        handles = [
            self._layers[layer_id].register_forward_hook(keep(index))
            for index, layer_id in enumerate(self.layer_ids)
        ]
        try:
            self._base(input_ids=ids_T[None], position_ids=positions_1T, use_cache=False, pack=pack)
        finally:
            for handle in handles:
                handle.remove()
        return states_TLH

    @contextlib.contextmanager
    def own_attention(self) -> Iterator[None]:
        """Run the model with transformers' plain attention: one document at a time, no packs."""
        self._base.config._attn_implementation = "eager"
        try:
            yield
        finally:
            self._base.config._attn_implementation = ATTENTION


def check_packing(target: Target) -> None:
    """Prove on the loaded weights that packing changes nothing and leaks nothing.

    Three short documents: changing the first must change the others by exactly 0, and each must be
    close to the same document run alone with transformers' own attention (a model that ignores our
    attention, or does more than ours, fails one of these). Raises UnsupportedTargetError.
    """
    try:
        _check_packing(target)
    except (NotPackableError, TypeError, AttributeError) as error:
        raise _unsupported(target.config, f"a trial forward failed: {error}") from error


def _check_packing(target: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    offsets = (0, 7, 20, 31)
    vocab_size = int(target.config.vocab_size)
    ids_T = torch.randint(vocab_size, (offsets[-1],), generator=generator)
    changed_T = ids_T.clone()
    changed_T[: offsets[1]] = (ids_T[: offsets[1]] + 1) % vocab_size
    states = target.capture(ids_T, offsets)
    other = target.capture(changed_T, offsets)
    rest = slice(offsets[1], None)
    if not torch.equal(states[rest], other[rest]):
        raise _unsupported(target.config, "changing one document of a pack changes another")
    for start, stop in itertools.pairwise(offsets):
        with target.own_attention():
            alone = target.capture(ids_T[start:stop], (0, stop - start)).float()
        # per layer: one with large states must not hide another
        error_L = (states[start:stop].float() - alone).norm(dim=(0, 2)) / alone.norm(dim=(0, 2))
        # bf16 noise was 0.8 % in SmolLM2, and 4 % in a small random model of large weights.
        if not bool((error_L < 0.1).all()):
            raise _unsupported(
                target.config,
                f"a document in a pack differs from the same one alone by {error_L.max():.1%}",
            )
    if torch.equal(states[: offsets[1]], other[: offsets[1]]):
        raise _unsupported(target.config, "the captured states do not depend on the tokens")


def load_config(config: TargetConfig) -> tuple[Any, str]:
    """Return the target's text config and its resolved commit ("" for a folder).

    Raises UnsupportedTargetError for an architecture that cannot be captured.
    """
    full = load_pretrained(AutoConfig, config.path, **_options(config))
    text = full.get_text_config()
    _refuse_unsupported(text)
    return text, getattr(full, "_commit_hash", None) or ""


def load_tokenizer(config: TargetConfig) -> Any:
    """Return the target's tokenizer, which must be a fast one with a chat template."""
    tokenizer = load_pretrained(AutoTokenizer, config.path, **_options(config))
    if not (tokenizer.is_fast and tokenizer.chat_template):
        lacks = "chat template" if tokenizer.is_fast else "tokenizer.json (a fast tokenizer)"
        raise ConfigError(
            f"the tokenizer of the target {config.path!r} has no {lacks}, without which "
            "conversations cannot become tokens. Use an instruction-tuned target, or add the file "
            "to its folder."
        )
    return tokenizer


def _options(config: TargetConfig) -> dict[str, Any]:
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


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
    """Load a part of a pretrained model; its many errors become one of ours, with the cause."""
    try:
        with _quiet():
            return loader.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"the target {path!r} cannot be loaded: {_what_is_wrong(path, loader, error)}. "
            "Expected a Hugging Face id, or a folder with config.json, safetensors weights and a "
            "tokenizer."
        ) from error


def _what_is_wrong(path: str, loader: Any, error: Exception) -> str:
    """Say which part of a folder is missing, for transformers speaks of the consequences."""
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
        output_loading_info=True,  # weights that a truncated model does not want are no matter
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
    return model


def check_layer_ids(config: TargetConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers to capture, checked against the target's depth."""
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
    kinds = set(getattr(config, "layer_types", None) or ()) - _FULL_ATTENTION
    if kinds:
        raise _unsupported(config, f"it has {', '.join(sorted(kinds))} layers")
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        raise _unsupported(config, f"it attends through a sliding window of {window}")


def _unsupported(config: Any, why: str) -> UnsupportedTargetError:
    return UnsupportedTargetError(
        f"targets of type {config.model_type!r} are not supported yet: {why}. Supported are "
        "full-attention decoders of transformers (Llama, SmolLM2, Qwen2, Qwen3, ...)."
    )


def _frozen_tensors(model: Any) -> "Frozen":
    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    norm = getattr(model.base_model, "norm", None)
    if norm is None:
        raise _unsupported(model.config, "its final norm is not found at `model.norm`")
    tied = head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding)
    return Frozen(
        embedding_VH=embedding,
        head_VH=None if tied else head,
        norm_H=norm.weight.detach(),
        norm_eps=float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))),
        norm_form=_norm_form(norm, model.config),
    )


def _norm_form(norm: Any, config: Any) -> str:
    """Tell RMSNorm(x) * w from RMSNorm(x) * (1 + w) by running it."""
    x = torch.linspace(-1, 2, norm.weight.numel(), dtype=torch.float32)[None]  # mean not 0
    unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
    weight = norm.weight.detach().float().cpu()
    found = norm(x.to(norm.weight)).detach().float().cpu()
    for form, scale in (("w", weight), ("1+w", 1 + weight)):
        if torch.allclose(found, unit * scale, rtol=0.02, atol=0.02):
            return form
    raise _unsupported(config, f"its final norm {type(norm).__name__} is no RMSNorm")


@dataclass(frozen=True)
class Frozen:
    """What training needs of the target: embedding, head [vocab, hidden]; final norm [hidden]."""

    embedding_VH: torch.Tensor
    head_VH: torch.Tensor | None
    """None when tied to the embedding"""
    norm_H: torch.Tensor
    norm_eps: float
    norm_form: str
    """"w" or "1+w": what the normalised vector is multiplied by"""

    def to_bytes(self) -> bytes:
        """Serialise as safetensors; equal weights give equal bytes."""
        tensors = {"embed_tokens.weight": self.embedding_VH, "norm.weight": self.norm_H}
        if self.head_VH is not None:
            tensors["lm_head.weight"] = self.head_VH
        metadata = {
            "norm_eps": repr(self.norm_eps),
            "norm_form": self.norm_form,
            "head": "tied" if self.head_VH is None else "lm_head.weight",
        }
        return _sort_header(
            save({name: t.contiguous().cpu() for name, t in tensors.items()}, metadata=metadata)
        )


def _sort_header(data: bytes) -> bytes:
    """Sort the header of safetensors bytes: the library writes metadata in a random order."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = canonical_json(json.loads(data[8:end]))
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]


def config_sha256(config: dict[str, Any]) -> str:
    """Hash a model config, names of folders and library versions aside."""
    free = {"_name_or_path", "transformers_version", "_commit_hash", "dtype", "torch_dtype"}
    kept = {key: value for key, value in config.items() if key not in free}
    return hashlib.sha256(canonical_json(kept)).hexdigest()


def weights_sha256(path: str) -> str:
    """Fingerprint a local folder's weights: names, sizes and crc32c of every safetensors file.

    Reads all bytes once, in threads; a hub model is pinned by its commit instead ("").
    """
    files = sorted(Path(path).glob("*.safetensors"))
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(_file_fingerprint, files))
    return hashlib.sha256(canonical_json(parts)).hexdigest() if parts else ""


def _file_fingerprint(path: Path) -> list[Any]:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            checksum = crc32c.crc32c(block, checksum)
    return [path.name, path.stat().st_size, f"{checksum:08x}"]


def tokenizer_sha256(tokenizer: Any) -> str:
    """Hash a tokenizer's vocabulary, merges and special tokens."""
    backend = tokenizer.backend_tokenizer.to_str()
    return hashlib.sha256(backend.encode()).hexdigest()


def template_sha256(tokenizer: Any) -> str:
    """Hash the chat template."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def library_versions() -> dict[str, str]:
    """Return the versions that decide what a forward computes."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}
