"""Choice of anchors: where blocks start in a document, how many, and how often a token is scored.

Takes loss masks and a key (seed, pass, document); hands sorted positions to `trainer.rows`.
A document's anchors depend on its key alone, so ranks, workers, accumulation and resume cannot
change them (design.md section 5).

Axes: T tokens of one document, V its valid anchors.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hscache.errors import DataError


def valid_anchors(loss_mask_T: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the positions a whose token and next token are both supervised, sorted, [anchors]."""
    mask_T = np.asarray(loss_mask_T, dtype=bool)
    return np.flatnonzero(mask_T[:-1] & mask_T[1:]).astype(np.int64)


def anchor_rate(
    *, total_tokens: int, total_valid_anchors: int, row_tokens: int, anchors_per_row: int
) -> float:
    """Return rho, the share of valid anchors that fills the anchor slots of a full pass.

    Raises `DataError` when the corpus has no valid anchor, since nothing could be learned.
    """
    if total_valid_anchors == 0:
        raise DataError(
            f"No valid anchor in {total_tokens} training tokens: an anchor needs two consecutive "
            "supervised tokens. Check the loss masks (`hscache inspect`)."
        )
    num_rows = -(-total_tokens // row_tokens)
    return anchors_per_row * num_rows / total_valid_anchors


def sample_anchors(
    valid_V: npt.NDArray[np.int64],
    *,
    rate: float,
    limit: int,
    seed: int,
    pass_index: int,
    document_id: int,
) -> npt.NDArray[np.int64]:
    """Draw n = min(V, limit, floor(rate * V + u)) anchors without replacement, sorted.

    u in [0, 1) makes the expected count exact where rate * V is not whole. All randomness is raw
    Philox output: key (seed, pass), the document in the counter's top word, so no two documents
    share a number. Raw output rather than `Generator.choice`, whose results numpy may change
    between versions. The V draws rank the anchors and the n smallest are taken.
    """
    bits = np.random.Philox(
        key=np.array([seed, pass_index], dtype=np.uint64),
        counter=np.array([0, 0, 0, document_id], dtype=np.uint64),
    )
    u = (int(bits.random_raw()) >> 11) * 2.0**-53
    n = min(len(valid_V), limit, int(rate * len(valid_V) + u))
    ranks_V = bits.random_raw(len(valid_V))
    return np.sort(valid_V[np.argsort(ranks_V, kind="stable")[:n]]).astype(np.int64)


def sample_slots(
    weights_K: npt.NDArray[np.float32],
    num_anchors: int,
    *,
    seed: int,
    pass_index: int,
    document_id: int,
) -> npt.NDArray[np.float32]:
    """Keep slot k of each block with probability weights_K[k], at weight 1; float32 [A, K].

    The expected loss is that of the decayed weights, at the cost of sum(weights_K) slots a block
    instead of K: the head's products are most of a small drafter's work. Keyed like
    `sample_anchors`, from numbers that it does not use.
    """
    bits = np.random.Philox(
        key=np.array([seed, pass_index], dtype=np.uint64),
        counter=np.array([0, 0, 1, document_id], dtype=np.uint64),
    )
    raw_AK = bits.random_raw(num_anchors * len(weights_K)).reshape(num_anchors, len(weights_K))
    uniform_AK = (raw_AK >> np.uint64(11)) * 2.0**-53
    return (uniform_AK < weights_K).astype(np.float32)


def coverage(
    loss_masks: Iterable[npt.NDArray[np.bool_]],
    *,
    rate: float,
    limit: int,
    keep_K: npt.NDArray[np.float32],
) -> float:
    """Return how often one pass scores a supervised token: the exact expectation, not a sample.

    A valid anchor is drawn with probability E[n] / V and then scores the supervised token k places
    after it with probability keep_K[k - 1] (all 1 unless slots are sampled). 0.0 when there is no
    supervised token.
    """
    slots_K = np.arange(1, len(keep_K) + 1)
    num_scorings, num_supervised = 0.0, 0
    for loss_mask_T in loss_masks:
        mask_T = np.asarray(loss_mask_T, dtype=bool)
        num_supervised += int(mask_T.sum())
        valid_V = valid_anchors(mask_T)
        if len(valid_V) == 0:
            continue
        cap = min(len(valid_V), limit)
        whole, fraction = divmod(rate * len(valid_V), 1.0)
        expected = (1 - fraction) * min(cap, whole) + fraction * min(cap, whole + 1)
        padded = np.concatenate([mask_T, np.zeros(len(keep_K), bool)])
        scored_K = padded[valid_V[:, None] + slots_K].sum(axis=0)
        num_scorings += expected / len(valid_V) * float(scored_K @ keep_K)
    return num_scorings / num_supervised if num_supervised else 0.0
