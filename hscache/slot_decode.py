"""Batched decoding with refill: when a prompt's answer ends, its slot is given the next prompt at
once.

Takes in token ids of prompts, from an iterable read only as slots become free; hands on finished
answers in the order in which they end. Works on any full-attention causal LM of transformers and on
the hybrids of Qwen3.5: prompts are prefilled alone and a step feeds one token to every slot, so no
padding ever meets a recurrent state.

Axes: S slots, T cached columns, P prompt tokens, V vocabulary.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hscache import kv_cache
from hscache.kv_cache import SlotCache


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to answer."""

    key: str
    """Names the row; together with the seed it fixes the row's random numbers."""
    prompt_ids: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One finished answer."""

    key: str
    ids: list[int]
    """Generated token ids, the stop token (if any) last."""
    finish_reason: Literal["stop", "length"]


@dataclass(kw_only=True)
class _Slot:
    """A prompt being answered: the state one row of the batch has besides its K/V."""

    request: Request
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        """Positions in the cache: all but the newest token, which the next step feeds."""
        return len(self.request.prompt_ids) + len(self.ids) - 1


def row_generator(seed: int, key: str) -> torch.Generator:
    """Return the random stream of one row; it depends on nothing but the seed and the row's key."""
    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)


def choose_tokens(
    logits_SV: Tensor, temperature: float, generators: Sequence[torch.Generator]
) -> list[int]:
    """Choose one token a row: the argmax at temperature 0, else by inverting the row's CDF at one
    uniform number."""
    if temperature == 0:
        return logits_SV.argmax(-1).tolist()
    # float64 sums: in float32 the tail of a 150k vocabulary would be lost to rounding.
    cdf_SV = (logits_SV.float() / temperature).softmax(-1).cumsum(-1, dtype=torch.float64)
    uniform_S = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
    targets_S1 = uniform_S.to(cdf_SV.device)[:, None] * cdf_SV[:, -1:]
    tokens_S1 = torch.searchsorted(cdf_SV, targets_S1, right=True)
    return tokens_S1[:, 0].clamp_(max=logits_SV.shape[-1] - 1).tolist()


@torch.inference_mode()
def decode_slots(
    model: PreTrainedModel,
    requests: Iterable[Request],
    *,
    batch_size: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stop_ids: Collection[int],
    on_step: Callable[[int], None] = lambda num_tokens: None,
) -> Iterator[Answer]:
    """Answer every request, at most `batch_size` at a time, and yield each answer as soon as it
    ends.

    `on_step` is called with the number of new tokens after each prefill and each step; what it
    raises ends the decoding. Raises `UnsupportedTargetError` for targets that `kv_cache.new_cache`
    does not know.
    """
    waiting = iter(requests)
    slots: list[_Slot] = []
    cache = SlotCache()

    def advance(slot: _Slot, token_id: int) -> Answer | None:
        slot.ids.append(token_id)
        if token_id in stop_ids:
            return Answer(key=slot.request.key, ids=slot.ids, finish_reason="stop")
        if len(slot.ids) == max_new_tokens:
            return Answer(key=slot.request.key, ids=slot.ids, finish_reason="length")
        return None

    def prefill() -> Iterator[Answer | tuple[_Slot, DynamicCache]]:
        """Yield answers that end with their first token, then at most one slot ready to decode."""
        for request in waiting:
            slot = _Slot(request=request, generator=row_generator(seed, request.key))
            prompt_cache = kv_cache.new_cache(model)
            logits_1V = _prefill_logits(model, request.prompt_ids, prompt_cache)
            answer = advance(slot, choose_tokens(logits_1V, temperature, [slot.generator])[0])
            on_step(1)
            if answer is None:
                yield slot, prompt_cache
                return
            yield answer

    while True:
        while len(slots) < batch_size:
            num_slots = len(slots)
            for item in prefill():
                if isinstance(item, Answer):
                    yield item
                else:
                    cache.add(item[1])
                    slots.append(item[0])
            if len(slots) == num_slots:
                break
        if not slots:
            return

        logits_SV = _step_logits(model, slots, cache)
        tokens = choose_tokens(logits_SV, temperature, [slot.generator for slot in slots])
        on_step(len(tokens))
        live: list[int] = []
        for index, token_id in enumerate(tokens):
            answer = advance(slots[index], token_id)
            if answer is None:
                live.append(index)
                continue
            yield answer
            for item in prefill():
                if isinstance(item, Answer):
                    yield item
                else:
                    slots[index] = item[0]
                    cache.replace(index, item[1])
                    live.append(index)
        if len(live) < len(slots):
            cache.keep(live)
            slots = [slots[index] for index in live]
        if slots:
            cache.trim(max(slot.num_cached for slot in slots))


def _prefill_logits(
    model: PreTrainedModel, prompt_ids: Sequence[int], cache: DynamicCache
) -> Tensor:
    """Run one prompt alone into an empty `cache`; return the last position's logits [1, V]."""
    ids_1P = torch.tensor([list(prompt_ids)], dtype=torch.long, device=model.device)
    output = model(ids_1P, **kv_cache.as_argument(model, cache), use_cache=True, logits_to_keep=1)
    assert kv_cache.length(cache) == len(prompt_ids)
    return output.logits[:, -1]


def _step_logits(model: PreTrainedModel, slots: Sequence[_Slot], cache: SlotCache) -> Tensor:
    """Feed every slot's newest token; return logits [S, V]. The cache grows by one column."""
    device = model.device
    newest_S1 = torch.tensor([[slot.ids[-1]] for slot in slots], device=device)
    position_S1 = torch.tensor([[slot.num_cached] for slot in slots], device=device)
    width = cache.width + 1
    # Left padding: a slot sees its last `num_cached` + 1 columns.
    mask_ST = torch.arange(width, device=device) >= width - 1 - position_S1
    output = model(
        newest_S1,
        attention_mask=mask_ST.long(),
        position_ids=position_S1,
        **kv_cache.as_argument(model, cache),
        use_cache=True,
    )
    return output.logits[:, -1]
