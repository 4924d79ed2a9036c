"""Speculative decoding of one prompt with the real target, greedy, and the check that its text is
the target's own.

Takes in a transformers causal LM, prompt ids and a `Proposer` (a drafter or a table); hands on the
committed ids with their acceptance lengths, and a verdict on whether they equal plain greedy
decoding. Loop semantics: dflash.md 4.1, as in z-lab's `dflash_generate` (DFlash, arXiv 2602.06036).

Axes: P prompt tokens, n newly committed positions, B block slots, F features (captured layers x
hidden), V vocabulary.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from hscache import kv_cache, rollback
from hscache.errors import HscacheError

# Two tokens whose logits lie this close are a tie in a 16-bit dtype: either is a correct greedy
# choice.
TIE_ULP = 2.0


class DecodeMismatchError(HscacheError):
    """Speculative decoding did not give the text that plain greedy decoding gives."""


class Proposer(Protocol):
    """Guesses the tokens behind an anchor. Make a new one for every prompt."""

    def observe(self, features_nF: Tensor) -> None:
        """Append the target's features of the next `n` context positions.

        First all prompt positions, then after every step the rows it committed, so at `propose` the
        context is exactly the positions before the anchor. F is the captured layers, concatenated
        in `target_layer_ids` order.
        """

    def propose(self, anchor_id: int, position: int, num_tokens: int) -> list[int]:
        """Return `num_tokens` draft ids for positions `position` + 1, ... behind the anchor at
        `position`."""


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """What one prompt's speculative decoding committed."""

    ids: list[int]
    """New token ids, the prefill's first token included, the stop token (if any) last."""
    acceptance_lengths: list[int]
    """Tokens committed by each verify step, bonus included, capped at the remaining length and at a
    stop token."""
    finish_reason: Literal["stop", "length"]

    @property
    def steps(self) -> int:
        """Verify steps, i.e. target passes after the prefill."""
        return len(self.acceptance_lengths)

    @property
    def committed(self) -> int:
        """Tokens committed by verify steps; the prefill's token is not one of them."""
        return sum(self.acceptance_lengths)


@dataclass(frozen=True, kw_only=True)
class Equality:
    """How speculative and plain greedy text compare."""

    kind: Literal["identical", "tie"]
    position: int | None = None
    """Index of the first differing new token (0 = the prefill's), None if identical."""
    gap_ulp: float = 0.0
    """Distance of the two tokens' logits there, in units in the last place of the larger one."""


@contextmanager
def _capture(target: PreTrainedModel, layer_ids: Sequence[int]) -> Iterator[list[Tensor]]:
    """Yield a list that holds, after each forward, the [1, n, H] outputs of these decoder blocks in
    the order given."""
    states: list[Tensor] = [torch.empty(0)] * len(layer_ids)

    def keep(index: int):
        def hook(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            states[index] = output[0] if isinstance(output, tuple) else output

        return hook

    layers: Any = target.get_decoder().layers
    handles = [
        layers[layer_id].register_forward_hook(keep(index))
        for index, layer_id in enumerate(layer_ids)
    ]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _forward(
    target: PreTrainedModel, ids: Sequence[int], start: int, cache: DynamicCache, **kwargs
) -> Tensor:
    """Run `ids` at positions `start`, ... on top of `cache`; return logits [n, V]."""
    input_ids_1n = torch.tensor([ids], dtype=torch.long, device=target.device)
    position_ids_1n = torch.arange(start, start + len(ids), device=target.device)[None]
    output = target(
        input_ids_1n,
        position_ids=position_ids_1n,
        use_cache=True,
        **kv_cache.as_argument(target, cache),
        **kwargs,
    )
    return output.logits[0]


def _up_to_stop(ids: Sequence[int], stop_ids: Collection[int]) -> tuple[list[int], bool]:
    """Cut `ids` behind the first stop token; also tell whether there was one."""
    for index, token_id in enumerate(ids):
        if token_id in stop_ids:
            return list(ids[: index + 1]), True
    return list(ids), False


@torch.inference_mode()
def speculative_decode(
    target: PreTrainedModel,
    input_ids: Sequence[int],
    proposer: Proposer,
    *,
    target_layer_ids: Sequence[int],
    block_size: int,
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> DecodeResult:
    """Decode one prompt greedily, letting the target verify up to `block_size` - 1 proposed tokens
    a step.

    A block is [anchor, drafts]; the target's argmax at slot i is its own choice for slot i + 1.
    Leading drafts that equal it are committed, then one token of the target's own (the bonus),
    which becomes the next anchor. `max_new_tokens` (>= 1) counts the prefill's token. A block
    shrinks to what is left to decode.
    Raises `UnsupportedTargetError` if the target's cache cannot be rolled back.
    """
    cache = kv_cache.new_cache(target)
    with _capture(target, target_layer_ids) as states:

        def features_nF(num_rows: int) -> Tensor:
            return torch.cat([state[0, :num_rows] for state in states], dim=-1)

        ids = [int(_forward(target, input_ids, 0, cache, logits_to_keep=1)[-1].argmax())]
        stopped = ids[0] in stop_ids
        proposer.observe(features_nF(len(input_ids)))
        acceptance_lengths: list[int] = []
        while not stopped and len(ids) < max_new_tokens:
            remaining = max_new_tokens - len(ids)
            anchor_position = len(input_ids) + len(ids) - 1
            num_drafts = min(block_size, remaining + 1) - 1
            drafts = proposer.propose(ids[-1], anchor_position, num_drafts) if num_drafts else []
            assert len(drafts) == num_drafts, f"asked for {num_drafts} drafts, got {len(drafts)}"

            with rollback.trial(target, cache) as trial:
                logits_BV = _forward(target, [ids[-1], *drafts], anchor_position, cache)
            choices = logits_BV.argmax(-1).tolist()
            num_accepted = next(
                (i for i in range(num_drafts) if drafts[i] != choices[i]), num_drafts
            )
            new_ids = [*drafts[:num_accepted], choices[num_accepted]][:remaining]
            new_ids, stopped = _up_to_stop(new_ids, stop_ids)
            # The promise of speculative decoding, checked at every step rather than trusted.
            assert new_ids == choices[: len(new_ids)], (
                "a committed token is not the target's argmax"
            )

            ids += new_ids
            acceptance_lengths.append(len(new_ids))
            # The last committed token is the next anchor: its own K/V and features do not exist
            # yet.
            trial.keep(len(new_ids))
            proposer.observe(features_nF(len(new_ids)))
    return DecodeResult(
        ids=ids,
        acceptance_lengths=acceptance_lengths,
        finish_reason="stop" if stopped else "length",
    )


@torch.inference_mode()
def plain_greedy(
    target: PreTrainedModel,
    input_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> list[int]:
    """Decode one prompt greedily, one token a step; return the new ids, the stop token (if any)
    last."""
    cache = kv_cache.new_cache(target)
    ids: list[int] = []
    pending, position = list(input_ids), 0
    while len(ids) < max_new_tokens:
        logits_1V = _forward(target, pending, position, cache, logits_to_keep=1)
        position += len(pending)
        pending = [int(logits_1V[-1].argmax())]
        ids += pending
        if pending[0] in stop_ids:
            break
    return ids


def ulp_gap(a: float, b: float, dtype: torch.dtype) -> float:
    """Return |a - b| in units in the last place of the larger magnitude, for a floating `dtype`;
    NaN or infinity: infinite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    info = torch.finfo(dtype)
    exponent = math.floor(math.log2(max(abs(a), abs(b), info.smallest_normal)))
    return abs(a - b) / (2.0**exponent * info.eps)


@torch.inference_mode()
def compare_with_greedy(
    target: PreTrainedModel,
    prompt_ids: Sequence[int],
    spec_ids: Sequence[int],
    greedy_ids: Sequence[int],
    dtype: torch.dtype,
) -> Equality:
    """Compare speculative with plain greedy text; a difference must be a tie of the target, or it
    is an error.

    In float32 any difference is an error. In a 16-bit dtype the two tokens at the first difference
    are scored by one teacher-forced pass over the common prefix: a gap of at most `TIE_ULP` is a
    tie (rounding of differently shaped passes), more is an error. Beyond a tie the texts may differ
    freely. One text ending inside the other is always an error: both stop at the same tokens and at
    the same length.
    Raises `DecodeMismatchError` naming the prompt's first tokens, the position and both tokens.
    """
    shared = next(
        (i for i, (a, b) in enumerate(zip(spec_ids, greedy_ids, strict=False)) if a != b),
        min(len(spec_ids), len(greedy_ids)),
    )
    where = f"prompt of {len(prompt_ids)} tokens {list(prompt_ids[:8])}..., new token {shared}"
    if shared == len(spec_ids) == len(greedy_ids):
        return Equality(kind="identical")
    if shared in (len(spec_ids), len(greedy_ids)):
        raise DecodeMismatchError(
            f"{where}: speculative decoding ended after {len(spec_ids)} tokens, plain greedy after "
            f"{len(greedy_ids)}, with equal tokens up to there. Both must use the same "
            "max_new_tokens and stop ids."
        )
    spec_id, greedy_id = spec_ids[shared], greedy_ids[shared]
    found = f"{where}: speculative decoding chose token {spec_id}, plain greedy {greedy_id}"
    if dtype == torch.float32:
        raise DecodeMismatchError(
            f"{found}. In float32 both must be identical: the rollback or the verify pass is wrong "
            "for this target."
        )
    prefix = [*prompt_ids, *spec_ids[:shared]]
    logits_V = _forward(target, prefix, 0, kv_cache.new_cache(target), logits_to_keep=1)[-1]
    spec_logit, greedy_logit = float(logits_V[spec_id]), float(logits_V[greedy_id])
    gap = ulp_gap(spec_logit, greedy_logit, dtype)
    if gap > TIE_ULP:
        raise DecodeMismatchError(
            f"{found}. One pass over the common text scores them {spec_logit:.6g} and "
            f"{greedy_logit:.6g}, {gap:.1f} ulp "
            f"of {dtype} apart; at most {TIE_ULP:g} is a tie. Repeat in float32 to see whether the "
            "loop is wrong."
        )
    return Equality(kind="tie", position=shared, gap_ulp=gap)
