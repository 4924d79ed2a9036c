"""Check the content of hidden states, not just their shape: what a broken capture looks like.

Takes a document's states and says what is wrong with them, or None. A band of plausible norms is
learnt from the documents of the same shard that came before.

Known ways to be silently wrong that this catches: slots never written (zero rows), one row
repeated (wrong gather), NaN or Inf from an overflow, a document whose norms are far from those of
its shard. What is wrong with all documents alike (a wrong layer, a norm applied) is for the trial
pack in `target.check_packing`.
"""

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hscache.planes import Bits

NORM_FACTOR = 10.0
_MIN_DOCUMENTS = 8
_SHARE_FLOOR = 1000
"""Documents below which a share of unusable ones says little."""


def count_seen(num_seen: int, num_documents: int) -> int:
    """Return of how many documents the unusable ones are a share.

    Of those seen so far, so that a broken source stops at once and not after 1 % of a corpus.
    """
    return max(num_seen, min(_SHARE_FLOOR, num_documents))


class ContentCheck:
    """Checks the documents of one shard in order; the band depends on that order alone."""

    def __init__(self) -> None:
        self._medians: list[npt.NDArray[np.float64]] = []

    def problem(self, bits_TLH: Bits) -> str | None:
        """Return why a document's states [T, L, H] cannot be used; if None, remember its norms."""
        if ((bits_TLH & 0x7F80) == 0x7F80).any():
            return "states that are not finite"
        values = bits_TLH.view(ml_dtypes.bfloat16).astype(np.float32)
        if not (bits_TLH & 0x7FFF).any(axis=2).all():
            return "an all-zero state"
        if len(values) > 1 and (bits_TLH == bits_TLH[:1]).all(axis=(0, 2)).any():
            return "the same state at every position"
        if (bits_TLH == bits_TLH[:, :, :1]).all(axis=2).any():
            return "a state with one value in all channels"
        with np.errstate(over="ignore"):
            norms_TL = np.linalg.norm(values, axis=2)
        if not np.isfinite(norms_TL).all():
            return "states too large for fp32 sums"
        norms_L = np.median(norms_TL, axis=0).astype(np.float64)
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
