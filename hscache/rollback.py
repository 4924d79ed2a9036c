"""Roll a decoding cache back: keep the first tokens of a forward pass and forget the others.

Keys and values are cut. A hybrid's recurrent states cannot be, for they hold all tokens in one
matrix: they are copied before the pass, and afterwards the delta-net layers alone run again over
the tokens to keep. `Cache.crop` is never used: 5.17 reads its argument as a length, 5.24 as a
negative count, and neither gives a recurrent state back.

Axes: B tokens of the pass, n tokens kept, H hidden.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hscache import kv_cache
from hscache.delta_net import linear_layers


@dataclass(kw_only=True)
class _DeltaNet:
    """One delta-net layer: its states before the pass and its input during the pass."""

    module: Any
    conv: Tensor
    recurrent: Tensor
    input_1BH: Tensor | None = None

    def record(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        """Keep the input of a call; a hook to run before it."""
        self.input_1BH = kwargs["hidden_states"]


class Trial:
    """A forward pass of which any number of leading tokens can be kept, once."""

    def __init__(self, model: PreTrainedModel, cache: Cache) -> None:
        self._cache = cache
        self._num_before = kv_cache.length(cache)
        assert self._num_before > 0, "a trial needs a cache with at least one position"
        self._delta_nets = [
            _DeltaNet(
                module=module,
                # Copies: transformers writes the states of the next pass into the same tensors.
                conv=cache.layers[module.layer_idx].conv_states[0].clone(),
                recurrent=cache.layers[module.layer_idx].recurrent_states[0].clone(),
            )
            for module in linear_layers(model.get_decoder())
        ]

    @torch.inference_mode()
    def keep(self, num_tokens: int) -> None:
        """Leave the cache as if the pass had run on its first `num_tokens` tokens only.

        Of a hybrid the delta-net layers run once more (in Qwen3.6-27B a fifth of the weights), on
        the inputs that they had in the pass. A token's input does not depend on later tokens, so
        the states become those after `num_tokens` tokens, and neither keys, values nor what the
        pass gave out (hidden states, logits) of the kept tokens change. Nothing runs if all tokens
        are kept.
        """
        num_passed = kv_cache.length(self._cache) - self._num_before
        assert 0 <= num_tokens <= num_passed, f"cannot keep {num_tokens} of {num_passed} tokens"
        if num_tokens == num_passed:
            return
        for layer in kv_cache.attention_layers(self._cache):
            # Views, which the next forward copies when it appends.
            layer.keys = layer.keys[..., : self._num_before + num_tokens, :]
            layer.values = layer.values[..., : self._num_before + num_tokens, :]
        for net in self._delta_nets:
            states: Any = self._cache.layers[net.module.layer_idx]
            states.conv_states[0], states.recurrent_states[0] = net.conv, net.recurrent
            assert net.input_1BH is not None
            assert net.input_1BH.shape[1] == num_passed, "a trial is one pass"
            if num_tokens:
                net.module(net.input_1BH[:, :num_tokens], self._cache)


@contextlib.contextmanager
def trial(model: PreTrainedModel, cache: Cache) -> Iterator[Trial]:
    """Watch one forward pass of `model` over `cache` (from `kv_cache.new_cache`, not empty).

    Batch 1 without padding. After the block, call `Trial.keep` before the next pass.

        with rollback.trial(model, cache) as trial:
            logits = model(...).logits
        trial.keep(3)
    """
    watched = Trial(model, cache)
    handles = [
        net.module.register_forward_pre_hook(net.record, with_kwargs=True)
        for net in watched._delta_nets
    ]
    try:
        yield watched
    finally:
        for handle in handles:
            handle.remove()
