"""Find out which block's output imported states are, by running documents through the target.

Takes the states of a few documents and the target with all its blocks captured; hands on the worst
difference, or refuses with the layers that do fit. Axes: T tokens, L stored layers, C candidates
(the embedding and every block but the last), H hidden, D documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hscache.errors import CacheMismatchError
from hscache.peer import Convention
from hscache.planes import Bits
from hscache.target import Target

CHECKED_TOKENS = 512
"""Of a document's beginning: states do not depend on what comes after."""
MAX_ERROR = 0.25
"""Largest relative error of a fit. See README for what was measured."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A document to check: `ids_T`, and its imported states as bf16 bits [T, L, H]."""

    where: str
    ids_T: npt.NDArray[np.int32]
    bits_TLH: Bits


def check_layers(
    target: Target, samples: Sequence[Sample], block_ids: Sequence[int], convention: Convention
) -> float:
    """Return the largest error of the stated layers over the samples.

    `target` captures blocks 0, 1, ... up to all but the last. Raises CacheMismatchError when
    another layer fits better than a stated one, when none fits, or when one document does not.
    """
    errors_DLC = np.stack([_errors(target, sample) for sample in samples])
    errors_LC = np.median(errors_DLC, axis=0)
    best_L = errors_LC.argmin(axis=1) - 1  # candidate 0 is the embedding, "block -1"
    if errors_LC.min(axis=1).max() > MAX_ERROR:
        layer = int(errors_LC.min(axis=1).argmax())
        raise CacheMismatchError(
            f"no block of {target.full_config['model_type']} {_name(target)} gives the states "
            f"stored as layer {layer + 1} of {len(block_ids)}: the nearest, block {best_L[layer]}, "
            f"differs by {errors_LC[layer].min():.0%} (at most {MAX_ERROR:.0%} is rounding). They "
            "were made by another model, by a quantised one, or through the final norm. Give the "
            "target they were made with."
        )
    if best_L.tolist() != list(block_ids):
        raise CacheMismatchError(_explain(block_ids, best_L.tolist(), errors_LC, convention))
    errors_DL = errors_DLC[:, np.arange(len(block_ids)), np.array(block_ids) + 1]
    worst_D = errors_DL.max(axis=1)
    if worst_D.max() > MAX_ERROR:
        document = int(worst_D.argmax())
        raise CacheMismatchError(
            f"{samples[document].where}: the states are not those of its ids: they differ from the "
            f"target's by {worst_D[document]:.0%}, other documents' by {np.median(worst_D):.1%}. "
            "States and ids were mixed up when the source was made."
        )
    return float(worst_D.max())


def _name(target: Target) -> str:
    return f"({target.num_target_layers} blocks, hidden {target.config.hidden_size})"


def _explain(
    stated: Sequence[int],
    fitting: Sequence[int],
    errors_LC: npt.NDArray[np.float64],
    convention: Convention,
) -> str:
    pairs = [
        f"  stated block {block}: differs by {errors_LC[i][block + 1]:.1%}; block {fit} fits, "
        f"by {errors_LC[i][fit + 1]:.1%}".replace("block -1", "the embedding")
        for i, (block, fit) in enumerate(zip(stated, fitting, strict=True))
    ]
    shifts = {fit - block for block, fit in zip(stated, fitting, strict=True)}
    other = "block" if convention == "hidden_states" else "hidden_states"
    if shifts == {1 if other == "block" else -1}:
        advice = (
            "Every layer is off by one: the ids are of the other convention. Give "
            f"--layer-convention {other} with the same ids."
        )
    else:
        ids = " ".join(str(fit + (convention == "hidden_states")) for fit in fitting)
        advice = f"By this convention the stored layers are --layer-ids {ids}."
    return "\n".join(
        ["the stored states are not the outputs of the stated layers:", *pairs, advice]
    )


def _errors(target: Target, sample: Sample) -> npt.NDArray[np.float64]:
    """Return how far each stored layer is from each candidate, [L, C].

    The median absolute difference over the median absolute value: a handful of tokens and channels
    carry most of a residual stream's norm and hardly change from block to block.
    """
    ids_T = torch.from_numpy(sample.ids_T[:CHECKED_TOKENS].astype(np.int64))
    bits_TLH = sample.bits_TLH[: len(ids_T)]
    stored_TLH = torch.from_numpy(bits_TLH.view(np.int16)).view(torch.bfloat16).float()
    blocks_TCH = target.capture(ids_T, (0, len(ids_T))).cpu()
    embedded_TH = target.frozen.embedding_VH.cpu()[ids_T]
    errors = []
    for candidate in range(blocks_TCH.shape[1] + 1):
        found_TH = embedded_TH if candidate == 0 else blocks_TCH[:, candidate - 1]
        scale = float(found_TH.float().abs().median())
        difference_TLH = (stored_TLH - found_TH.float()[:, None]).abs()
        errors.append(difference_TLH.transpose(0, 1).flatten(1).median(dim=1).values / scale)
    return torch.stack(errors, dim=1).double().numpy()
