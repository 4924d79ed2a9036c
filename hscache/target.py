"""The frozen target: load it, run packs of documents through it, capture hidden states.

Takes a `TargetConfig`; hands on `Target.capture`, the tokenizer, and what training needs of the
target (embedding, head, final norm). Any full-attention causal LM of transformers works, and the
Qwen3.5 hybrids (hscache.delta_net): their attention is replaced by one that never looks across
documents, the model is cut after the last captured block, and a self-check at load time proves both
on the real weights.

Axes: T tokens of a pack, L captured layers, H hidden, D head dim, N heads.
"""

import contextlib
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hscache import delta_net, packed_forward
from hscache.config import TargetConfig
from hscache.device import DTYPES, choose_device
from hscache.frozen import check_frozen, frozen_tensors
from hscache.pack import Pack, make_pack
from hscache.pretrained import (
    check_layer_ids,
    is_hybrid,
    load_config,
    load_model,
    load_tokenizer,
    pretrained_options,
    unsupported,
)

log = logging.getLogger(__name__)

ATTENTION = "hscache_packed"

_NOT_OURS = {"s_aux", "softcap", "sliding_window", "position_bias"}
"""Options of attention functions that change the result and that ours does not know."""


class NotPackableError(Exception):
    """The model calls our attention in a way that ours would answer wrongly."""


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


class Target:
    """A loaded, truncated target."""

    def __init__(self, config: TargetConfig) -> None:
        self.device = choose_device(config.device)
        self.dtype = DTYPES[config.dtype]
        self.config, self.revision = load_config(config)
        self.num_target_layers = int(self.config.num_hidden_layers)
        self.layer_ids = check_layer_ids(config, self.num_target_layers)
        self.tokenizer = load_tokenizer(config, self.revision)
        self.full_config = json.loads(self.config.to_json_string(use_diff=False))

        last = self.num_target_layers - 1 if config.last_hidden else self.layer_ids[-1]
        self.captured_ids = (*self.layer_ids, last) if config.last_hidden else self.layer_ids
        self.config.num_hidden_layers = last + 1
        if getattr(self.config, "layer_types", None):
            self.config.layer_types = self.config.layer_types[: last + 1]
        self.config.use_cache = False
        model = load_model(
            config.path,
            config=self.config,
            dtype=self.dtype,
            attn_implementation=ATTENTION,
            **pretrained_options(config, self.revision),
        )
        self._base = model.base_model
        self._packed = True
        layers = getattr(self._base, "layers", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) != last + 1:
            raise unsupported(self.config, "its decoder blocks are not found at `model.layers`")
        self._layers = layers
        self.frozen = frozen_tensors(model)
        ids_T = torch.arange(5) % int(self.config.vocab_size)
        pack = make_pack((0, 5), torch.device("cpu"))
        try:
            with delta_net.apart(self._base, pack.offsets):
                check_frozen(model, self.frozen, ids_T, pack=pack)
        except NotPackableError as error:
            raise unsupported(self.config, f"a trial forward failed: {error}") from error
        self._base.norm = nn.Identity()  # never applied to a captured layer
        self._fused = self._place()
        check_packing(self)

    @property
    def forward_name(self) -> str:
        """Which code computes the states: fused (hscache.packed_forward) or transformers."""
        return "transformers" if self._fused is None else "fused"

    def _place(self) -> packed_forward.PackedForward | None:
        """Move the decoder to its device; return the fused forward if it can run there."""
        self._base.eval()
        if self.device.type != "cuda":
            self._base.to(self.device)
            return None
        kernels, why_not = packed_forward.kernels(), packed_forward.why_not(self._base)
        if kernels is None:
            why_not = "triton and fla are not both installed (pip install 'hscache[cuda]')"
        elif self.dtype != torch.bfloat16:
            why_not = f"its dtype is {self.dtype}"
        if why_not is not None:
            log.warning("transformers' own layers run the target, slower: %s", why_not)
            self._base.to(self.device)
            return None
        assert kernels is not None
        packed_forward.place(self._base, self.device)
        fused = packed_forward.PackedForward(self._base, self.captured_ids, kernels)
        fused.warm_up()
        return fused

    def capture(self, ids_T: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
        """Return the states of a pack, bfloat16 [T, L, H] on the device; L counts `captured_ids`.

        `ids_T` int64 token ids, `offsets` the documents' boundaries in it, from 0 to T. States are
        the raw outputs of the blocks in `captured_ids` (`layer_ids`, and with `last_hidden` the
        last block), before any norm, as if every document ran alone.
        """
        return self._capture(ids_T, offsets, torch.bfloat16)

    @torch.inference_mode()
    def _capture(
        self, ids_T: torch.Tensor, offsets: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        if self._fused is not None and self._packed:
            return self._fused(ids_T, offsets, dtype)
        ids_T = ids_T.to(self.device)
        pack = make_pack(offsets, self.device)
        positions_1T = pack.positions_T.long()[None]
        states_TLH = torch.empty(
            (len(ids_T), len(self.captured_ids), self.config.hidden_size),
            dtype=dtype,
            device=self.device,
        )

        def keep(index: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                states_TLH[:, index] = hidden[0]

            return hook

        handles = [
            self._layers[layer_id].register_forward_hook(keep(index))
            for index, layer_id in enumerate(self.captured_ids)
        ]
        try:
            with delta_net.apart(self._base, pack.offsets if self._packed else None):
                self._base(
                    input_ids=ids_T[None], position_ids=positions_1T, use_cache=False, pack=pack
                )
        finally:
            for handle in handles:
                handle.remove()
        return states_TLH

    @contextlib.contextmanager
    def own_attention(self) -> Iterator[None]:
        """Run the model with transformers' plain layers: one document at a time, no packs."""
        self._base.config._attn_implementation = "eager"
        self._packed = False
        try:
            yield
        finally:
            self._base.config._attn_implementation = ATTENTION
            self._packed = True

    def without_decay(self) -> contextlib.AbstractContextManager[None]:
        """Let a hybrid's recurrent states forget nothing: a leak in them cannot fade unseen."""
        return delta_net.without_decay(self._base)


def check_packing(target: Target) -> None:
    """Prove on the loaded weights that packing changes nothing and leaks nothing.

    Short documents: changing one must change the others by exactly 0, also while a hybrid's
    recurrent states are kept from decaying, and each must be close to the same document run alone
    with transformers' own layers (a model that ignores our attention, or does more than ours, fails
    one of these). Raises UnsupportedTargetError.
    """
    try:
        _check_packing(target)
    except (NotPackableError, TypeError, AttributeError) as error:
        raise unsupported(target.config, f"a trial forward failed: {error}") from error


# A document of one token, and one of more than a scan's chunk of 64.
_PROBE = (0, 7, 8, 78, 89)


def _check_packing(target: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(int(target.config.vocab_size), (_PROBE[-1],), generator=generator)
    _check_apart(target, ids_T)
    if is_hybrid(target.config):
        with target.without_decay():
            _check_apart(target, ids_T)
    states = target.capture(ids_T, _PROBE)
    for start, stop in itertools.pairwise(_PROBE):
        with target.own_attention():
            alone = target.capture(ids_T[start:stop], (0, stop - start)).float()
        # per layer: one with large states must not hide another
        error_L = (states[start:stop].float() - alone).norm(dim=(0, 2)) / alone.norm(dim=(0, 2))
        # bf16 noise was 0.8 % in SmolLM2, and 4 % in a small random model of large weights.
        if not bool((error_L < 0.1).all()):
            raise unsupported(
                target.config,
                f"a document in a pack differs from the same one alone by {error_L.max():.1%}",
            )


def _check_apart(target: Target, ids_T: torch.Tensor) -> None:
    """Change each document in turn; the states of the others must not move by one bit."""
    # not rounded to bf16, which would hide a small leak in a float32 target
    states = target._capture(ids_T, _PROBE, target.dtype)
    for start, stop in itertools.pairwise(_PROBE):
        changed_T = ids_T.clone()
        changed_T[start:stop] = (ids_T[start:stop] + 1) % int(target.config.vocab_size)
        other = target._capture(changed_T, _PROBE, target.dtype)
        if not (
            torch.equal(states[:start], other[:start]) and torch.equal(states[stop:], other[stop:])
        ):
            raise unsupported(target.config, "changing one document of a pack changes another")
        if torch.equal(states[start:stop], other[start:stop]):
            raise unsupported(target.config, "the captured states do not depend on the tokens")
