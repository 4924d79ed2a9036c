"""Caches of targets that decode: full attention's keys and values, a hybrid's recurrent states, and
a cache of slots for batched decoding.

Takes in a model, or the caches of single prompts; hands on an empty cache, or one batch whose slots
can be refilled while the others keep decoding. Cutting a cache back is hscache.rollback's job.

Axes: S slots, N heads, T columns (positions), D head dim; C channels, K columns of a convolution.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from hscache.errors import UnsupportedTargetError
from hscache.pretrained import is_hybrid

# Columns added on the right whenever a buffer is remade, so that remaking is rare.
MIN_SPARE_COLUMNS = 64
_CACHE_ARGUMENTS = {"cache", "past_key_values"}


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache to decode with `model`.

    Raises `UnsupportedTargetError` for a target with anything but full attention, or, in the
    hybrids of Qwen3.5 and 3.6, gated delta-net.
    """
    cache = DynamicCache(config=model.config)
    # Exact types: sliding and quantised layers derive from DynamicLayer but do not keep plain K/V.
    known = {DynamicLayer, LinearAttentionLayer} if is_hybrid(model.config) else {DynamicLayer}
    for layer_id, layer in enumerate(cache.layers):
        if type(layer) not in known:
            raise _cannot_decode(
                model,
                f"the cache of layer {layer_id} is a {type(layer).__name__}, which cannot be cut "
                "back to an earlier position",
            )
    if not _CACHE_ARGUMENTS & set(inspect.signature(type(model).forward).parameters):
        raise _cannot_decode(model, "its forward takes no key/value cache")
    return cache


def _cannot_decode(model: PreTrainedModel, why: str) -> UnsupportedTargetError:
    return UnsupportedTargetError(
        f"targets of type {model.config.model_type!r} cannot decode here: {why}. Use a target "
        "with full attention in every layer (Llama, Qwen3, ...) or a hybrid of Qwen3.5 or 3.6, or "
        "let a serving engine answer."
    )


def attention_layers(cache: Cache) -> list[Any]:
    """Return the layers that hold keys and values of every position, in order."""
    return [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]


def length(cache: Cache) -> int:
    """Return the number of cached positions, the same in every attention layer (0 for a cache not
    yet used)."""
    lengths = {layer.get_seq_length() for layer in attention_layers(cache)}
    assert len(lengths) <= 1, f"cache layers disagree about their length: {sorted(lengths)}"
    return lengths.pop() if lengths else 0


def as_argument(model: nn.Module, cache: Cache) -> dict[str, Cache]:
    """Return the keyword argument that passes `cache` to the model: `cache` since 5.24,
    `past_key_values` before."""
    model_type: Any = type(model)
    return {_argument_name(model_type): cache}


@functools.cache
def _argument_name(model_type: Any) -> str:
    parameters = inspect.signature(model_type.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


class SlotLayer(DynamicLayer):
    """One layer's K/V of all slots, ending at a common column, in buffers with room on both sides.

    `keys` and `values` [S, N, T, D] are views of the live columns. A new column is written into the
    buffer instead of being concatenated, which would copy the whole cache at every step. Columns
    left of a slot's own text hold finite left-overs that the attention mask must hide.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys_SNTD: Tensor, values_SNTD: Tensor) -> None:
        super().__init__()
        self.dtype, self.device = keys_SNTD.dtype, keys_SNTD.device
        self.is_initialized = True
        self._buffers: tuple[Tensor, ...] = (keys_SNTD, values_SNTD)
        self._show(0, keys_SNTD.shape[-2])

    def _show(self, start: int, end: int) -> None:
        self._start, self._end = start, end
        self.keys, self.values = (buffer[:, :, start:end] for buffer in self._buffers)

    def _make_room(self, left: int, right: int) -> None:
        """Guarantee `left` free columns before the live ones and `right` after them."""
        capacity = self._buffers[0].shape[-2]
        if left <= self._start and self._end + right <= capacity:
            return
        width = self._end - self._start
        right = max(right, width // 2, MIN_SPARE_COLUMNS)
        live = (self.keys, self.values)
        # Zeros, not empty: a masked column still enters a product with weight 0, and 0 x NaN is
        # NaN.
        self._buffers = tuple(
            x.new_zeros((*x.shape[:2], left + width + right, x.shape[-1])) for x in live
        )
        self._show(left, left + width)
        self.keys.copy_(live[0])
        self.values.copy_(live[1])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Append columns [S, N, n, D] to all slots and return all live keys and values
        (transformers' interface)."""
        num_new = key_states.shape[-2]
        self._make_room(0, num_new)
        end = self._end
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, end : end + num_new] = new
        self._show(self._start, end + num_new)
        return self.keys, self.values

    def place(self, slot: int, prompt_layer: Any) -> None:
        """Write one prompt into `slot`, ending at the last live column; the cache widens if the
        prompt is longer."""
        keys_1NTD, values_1NTD = prompt_layer.keys, prompt_layer.values
        num_columns = keys_1NTD.shape[-2]
        missing = num_columns - (self._end - self._start)
        if missing > 0:
            self._make_room(missing, 0)
            self._show(self._start - missing, self._end)
        self.keys[slot, :, -num_columns:] = keys_1NTD[0]
        self.values[slot, :, -num_columns:] = values_1NTD[0]

    def add_slot(self) -> None:
        """Add one slot of zeros behind the others."""
        self._buffers = tuple(
            torch.cat([x, torch.zeros_like(x[:1])]) for x in (self.keys, self.values)
        )
        self._show(0, self._end - self._start)

    def keep_slots(self, slots: Sequence[int]) -> None:
        """Keep these slots, in this order, and drop the others."""
        index = torch.tensor(slots, dtype=torch.long, device=self.device)
        self._buffers = (self.keys.index_select(0, index), self.values.index_select(0, index))
        self._show(0, self._end - self._start)

    def trim(self, width: int) -> None:
        """Drop columns on the left until `width` are live."""
        self._show(self._end - width, self._end)


class RecurrentSlotLayer(LinearAttentionLayer):
    """One delta-net layer's states of all slots: no columns, so nothing is aligned or padded.

    `conv_states[0]` [S, C, K] and `recurrent_states[0]` [S, N, D, D] start as what each prompt's
    prefill left; every step feeds one token to every slot.
    """

    conv_states: dict[int, Any]
    recurrent_states: dict[int, Any]

    def __init__(self, prompt_layer: Any) -> None:
        super().__init__()
        self.update_conv_state(prompt_layer.conv_states[0])
        self.update_recurrent_state(prompt_layer.recurrent_states[0])

    def place(self, slot: int, prompt_layer: Any) -> None:
        """Overwrite the states of `slot`."""
        self.conv_states[0][slot] = prompt_layer.conv_states[0][0]
        self.recurrent_states[0][slot] = prompt_layer.recurrent_states[0][0]

    def add_slot(self) -> None:
        """Add one slot of zeros behind the others."""
        for states in (self.conv_states, self.recurrent_states):
            states[0] = torch.cat([states[0], torch.zeros_like(states[0][:1])])

    def keep_slots(self, slots: Sequence[int]) -> None:
        """Keep these slots, in this order, and drop the others."""
        for states in (self.conv_states, self.recurrent_states):
            index = torch.tensor(slots, dtype=torch.long, device=states[0].device)
            states[0] = states[0].index_select(0, index)

    def trim(self, width: int) -> None:
        """Do nothing: there are no columns."""


class SlotCache(Cache):
    """A batch of right-aligned sequences (slots) that are added, replaced and dropped while
    decoding goes on.

    Every slot ends at the last column; a slot with fewer positions than `width` is padded on its
    left. Pass it to the model together with a left-padded attention mask and explicit
    `position_ids`.
    """

    layers: list[Any]

    def __init__(self) -> None:
        super().__init__(layers=[])

    @property
    def width(self) -> int:
        """Number of live columns: at least the longest slot's length."""
        return length(self)

    def add(self, prompt_cache: Cache) -> None:
        """Append a slot holding one prefilled prompt (a cache of `new_cache`, batch 1)."""
        if not self.layers:
            self.layers = [_slot_layer(layer) for layer in prompt_cache.layers]
            return
        for layer in self.layers:
            layer.add_slot()
        self.replace(-1, prompt_cache)

    def replace(self, slot: int, prompt_cache: Cache) -> None:
        """Overwrite `slot` with one prefilled prompt (a cache of `new_cache`, batch 1)."""
        for layer, prompt_layer in zip(self.layers, prompt_cache.layers, strict=True):
            layer.place(slot, prompt_layer)

    def keep(self, slots: Sequence[int]) -> None:
        """Keep these slots, in this order; an empty sequence empties the cache."""
        if not slots:
            self.layers = []
        for layer in self.layers:
            layer.keep_slots(slots)

    def trim(self, width: int) -> None:
        """Keep the last `width` columns, which must cover the longest slot."""
        assert width <= self.width
        for layer in self.layers:
            layer.trim(width)


def _slot_layer(prompt_layer: Any) -> SlotLayer | RecurrentSlotLayer:
    if isinstance(prompt_layer, LinearAttentionLayer):
        return RecurrentSlotLayer(prompt_layer)
    return SlotLayer(prompt_layer.keys, prompt_layer.values)
