"""Check the states that a forward makes on this machine, without a second machine to compare with.

Takes a capture function and a decoder; hands on figures, and says in plain words what is off. Two
runs must agree to the bit, a changed document must change no other, and the first blocks must be as
close to float32 as transformers' own layers in the same dtype.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hscache import packed_forward, packed_ops

_BLOCKS = 4
"""Blocks compared with float32: every fourth of a hybrid is attention."""
_LENGTHS = (1, 200, 63, 129)
ERROR_FACTOR = 1.1
"""How much further from float32 than transformers' layers the states may be."""


@torch.inference_mode()
def states_facts(
    capture: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    ids_T: torch.Tensor,
    offsets: Sequence[int],
) -> dict[str, Any]:
    """Run a pack twice, then with its second document changed; say what became of the others.

    `capture` takes ids int64 [T] and the documents' boundaries and returns states [T, L, H].
    """
    first = capture(ids_T, offsets)
    found = {
        "finite": bool(first.isfinite().all()),
        "equal_twice": torch.equal(first, capture(ids_T, offsets)),
    }
    if len(offsets) > 2:
        start, stop = offsets[1], offsets[2]
        changed_T = ids_T.clone()
        changed_T[start:stop] = (ids_T[start:stop] + 1) % (ids_T.max() + 1)
        other = capture(changed_T, offsets)
        found["apart"] = torch.equal(other[:start], first[:start]) and torch.equal(
            other[stop:], first[stop:]
        )
    return found


@torch.inference_mode()
def reference_errors(base: Any) -> dict[str, Any]:
    """Compare the first blocks with float32: the fused forward's error, and transformers' own.

    Relative L2 errors of the last of these blocks. {} for a decoder that has no fused forward.
    """
    device = base.embed_tokens.weight.device
    kernels = packed_forward.kernels() if device.type == "cuda" else packed_ops
    if packed_forward.why_not(base) is not None or kernels is None:
        return {}
    few = _first_blocks(base, base.embed_tokens.weight.dtype)
    exact = _first_blocks(base, torch.float32)
    offsets = [0, *itertools.accumulate(_LENGTHS)]
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(int(base.config.vocab_size), (offsets[-1],), generator=generator)
    ids_T = ids_T.to(device)
    last = (len(few.layers) - 1,)
    expected = packed_forward.PackedForward(exact, last)(ids_T, offsets, torch.float32)[:, 0]
    ours = packed_forward.PackedForward(few, last, kernels)(ids_T, offsets)[:, 0]
    kept = base.config._attn_implementation
    base.config._attn_implementation = "eager"  # one config for all
    try:
        theirs = torch.cat(
            [
                few(input_ids=ids_T[None, a:b], use_cache=False).last_hidden_state[0]
                for a, b in itertools.pairwise(offsets)
            ]
        )
    finally:
        base.config._attn_implementation = kept
    return {
        "error": _relative(ours, expected),
        "error_of_transformers": _relative(theirs, expected),
        "blocks_compared": len(few.layers),
    }


def off_in_words(checks: dict[str, Any]) -> list[str]:
    """Return what is wrong with the states, one sentence each; empty when all is well."""
    said = []
    if not checks["finite"]:
        said.append("states are NaN or infinite: do not use this machine's states")
    if not checks["equal_twice"]:
        said.append("two runs of one pack differ: a kernel races on this GPU")
    if not checks.get("apart", True):
        said.append("a document changed the states of another: packs leak on this GPU")
    if "error" in checks and not (
        (error := checks["error"]) <= ERROR_FACTOR * (theirs := checks["error_of_transformers"])
    ):
        said.append(
            f"states are {error:.2%} from float32 after {checks['blocks_compared']} blocks, "
            f"transformers' layers {theirs:.2%}: a kernel is less exact here than it should be"
        )
    return said


def _first_blocks(base: Any, dtype: torch.dtype) -> Any:
    """Return the first blocks of a decoder in a dtype, with weights of their own."""
    few = copy.copy(base)
    few._modules = dict(base._modules)
    one_config = {id(base.config): base.config}  # which says how they attend
    blocks = [copy.deepcopy(block, dict(one_config)).to(dtype) for block in base.layers[:_BLOCKS]]
    few.layers = nn.ModuleList(blocks)
    if dtype != base.embed_tokens.weight.dtype:
        few.embed_tokens = nn.Embedding.from_pretrained(base.embed_tokens.weight.to(dtype))
    packed_forward.place(few, base.embed_tokens.weight.device)
    return few


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())
