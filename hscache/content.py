"""Check the content of hidden states, not just their shape: what a broken capture looks like.

Takes a document's states and says what is wrong with them, or None. A band of plausible norms is
learnt from the documents of the same shard that came before.

Known ways to be silently wrong that this catches: slots never written (zero rows), one row
repeated (wrong gather), NaN or Inf from an overflow, a document whose norms are far from those of
its shard. What is wrong with all documents alike (a wrong layer, a norm applied) is for the trial
pack in `target.check_packing`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hscache.planes import Bits, blocks, to_float32

NORM_FACTOR = 10.0
_MIN_DOCUMENTS = 8
_SHARE_FLOOR = 1000
"""Documents below which a share of unusable ones says little."""


def count_seen(num_seen: int, num_documents: int) -> int:
    """Return of how many documents the unusable ones are a share.

    Of those seen so far, so that a broken source stops at once and not after 1 % of a corpus.
    """
    return max(num_seen, min(_SHARE_FLOOR, num_documents))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the check looks at, of one document [T, L, H]; a GPU can find it out too."""

    finite: bool
    zero_row: bool
    """a state of zeros"""
    flat_row: bool
    """a state with one value in all channels"""
    repeated: bool
    """more than one token, and in some layer all have the same state"""
    norms_TL: npt.NDArray[np.float32]


def facts(bits_TLH: Bits) -> Facts:
    """Look at a document's states, bf16 bits [T, L, H]."""
    largest_TL = np.empty(bits_TLH.shape[:2], np.uint16)
    norms_TL = np.empty(bits_TLH.shape[:2], np.float32)
    for rows in blocks(bits_TLH):
        largest_TL[rows] = (bits_TLH[rows] & 0x7FFF).max(axis=2)
        values = to_float32(bits_TLH[rows])
        with np.errstate(over="ignore", invalid="ignore"):
            norms_TL[rows] = np.sqrt(np.vecdot(values, values))
    # A look at a few values leaves next to nothing to compare in full.
    flat = bits_TLH[(bits_TLH[:, :, :8] == bits_TLH[:, :, :1]).all(axis=2)]
    alike_L = (bits_TLH[-1:] == bits_TLH[:1]).all(axis=(0, 2))
    alike_TLH = bits_TLH[:, alike_L]
    return Facts(
        finite=bool((largest_TL < 0x7F80).all()),
        zero_row=bool((largest_TL == 0).any()),
        flat_row=bool((flat == flat[:, :1]).all(axis=1).any()),
        repeated=len(bits_TLH) > 1 and bool((alike_TLH == alike_TLH[:1]).all(axis=(0, 2)).any()),
        norms_TL=norms_TL,
    )


class ContentCheck:
    """Checks the documents of one shard in order; the band depends on that order alone."""

    def __init__(self) -> None:
        self._medians: list[npt.NDArray[np.float64]] = []

    def problem(self, document: Bits | Facts) -> str | None:
        """Return why a document's states cannot be used; if None, remember its norms.

        `document` is its bf16 bits [T, L, H], or what was measured of them.
        """
        found = document if isinstance(document, Facts) else facts(document)
        if not found.finite:
            return "states that are not finite"
        if found.zero_row:
            return "an all-zero state"
        if found.repeated:
            return "the same state at every position"
        if found.flat_row:
            return "a state with one value in all channels"
        if not np.isfinite(found.norms_TL).all():
            return "states too large for fp32 sums"
        norms_L = np.median(found.norms_TL, axis=0).astype(np.float64)
        if len(self._medians) >= _MIN_DOCUMENTS:
            usual_L = np.median(self._medians, axis=0)
            off_L = (norms_L > NORM_FACTOR * usual_L) | (norms_L * NORM_FACTOR < usual_L)
            if off_L.any():
                layer = int(np.flatnonzero(off_L)[0])
                return (
                    f"norms out of band: median {norms_L[layer]:.4g} at captured layer {layer}, "
                    f"others {usual_L[layer]:.4g}"
                )
        self._medians.append(norms_L)
        return None
