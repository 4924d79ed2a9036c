"""How a drafter does on held-out documents: loss, accuracy of each slot, acceptance lengths.

Takes a drafter and documents with their states; packs the documents into rows of the training
shape, drafts a block at every supervised position, and hands on sums that add up. No target, no
decoding: where the recorded text is the target's greedy text (answers sampled at temperature 0) the
sequential acceptance length is what real decoding gives; elsewhere it is an estimate (dflash.md
4.3). Nothing is drawn at random and nothing of the drafter is changed.

Axes: S row tokens, F features, N blocks of a row, K predicted slots, M scored slots, T tokens and
A anchors of one document.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from hscache.reader import Cache, Document, TorchDocument
from trainer.acceptance import Acceptance, document_acceptance
from trainer.anchors import valid_anchors
from trainer.attention import Backend
from trainer.batches import to_batch
from trainer.drafter import Drafter
from trainer.frozen import FrozenTarget
from trainer.row_loss import row_hidden
from trainer.rows import Row, RowDocument, build_row, decayed_weights
from trainer.schedule import Position

_LARGEST_CHUNK = 1024
"""Slots whose logits are held at once, also in fp32: 2.5 GB at a vocabulary of 248,320."""


class RecordedDocument(Protocol):
    """What is asked of a document; `hscache.reader.Document` has it."""

    @property
    def input_ids(self) -> npt.NDArray[np.int32]:
        """Token ids [T]."""

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """True where the token is supervised [T]."""

    def torch(self) -> TorchDocument:
        """Read the states from disk."""


@dataclass(frozen=True, kw_only=True)
class HeldOutFigures:
    """Sums over held-out documents; add them with `+`. A figure is None without anything to score.

    All valid anchors are scored. The loss is the cross-entropy of the recorded text by training's
    slot weights, also where training minimises another one (soft labels, D-PACE).
    """

    num_documents: int = 0
    num_anchors: int = 0
    loss_sum: float = 0.0
    weight_sum: float = 0.0
    correct_K: tuple[int, ...] = ()
    """right predictions at slot k, at k - 1"""
    scored_K: tuple[int, ...] = ()
    acceptance: Acceptance = field(default_factory=Acceptance)

    @property
    def loss(self) -> float | None:
        """Mean cross-entropy in nats."""
        return self.loss_sum / self.weight_sum if self.weight_sum else None

    @property
    def accuracy(self) -> float | None:
        """Share of right predictions over all slots."""
        return sum(self.correct_K) / sum(self.scored_K) if any(self.scored_K) else None

    @property
    def slot_accuracy_K(self) -> list[float | None]:
        """Share of right predictions of each slot, whether those before it are right or not."""
        pairs = zip(self.correct_K, self.scored_K, strict=True)
        return [correct / scored if scored else None for correct, scored in pairs]

    def __add__(self, other: HeldOutFigures) -> HeldOutFigures:
        return HeldOutFigures(
            num_documents=self.num_documents + other.num_documents,
            num_anchors=self.num_anchors + other.num_anchors,
            loss_sum=self.loss_sum + other.loss_sum,
            weight_sum=self.weight_sum + other.weight_sum,
            correct_K=_add(self.correct_K, other.correct_K),
            scored_K=_add(self.scored_K, other.scored_K),
            acceptance=self.acceptance + other.acceptance,
        )


def _add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in itertools.zip_longest(a, b, fillvalue=0))


def held_out_documents(cache: Cache) -> list[Document]:
    """Return the held-out documents with states: produced, and not quarantined."""
    published = set(cache.published_shards())
    shards = [cache.shard(n) for n in cache.plan.held_out_shards if n in published]
    rows = {int(row) for shard in shards for row in shard.doc_rows}
    return [document for document in cache.held_out if document.row in rows]


def choose_documents(cache: Cache, limit: int, longest: int) -> list[Document]:
    """Return the first `limit` held-out documents that have anchors and at most `longest` tokens.

    The plan is shuffled by its seed, so the first ones are a sample of all, the same in every run
    on this cache, and lie in few shards.
    """
    fit = (
        document
        for document in held_out_documents(cache)
        if len(document) <= longest and len(valid_anchors(document.loss_mask))
    )
    return list(itertools.islice(fit, limit))


@torch.no_grad()  # not inference_mode: what training compiled must not meet inference tensors
def evaluate_held_out(
    drafter: Drafter,
    frozen: FrozenTarget,
    documents: Iterable[RecordedDocument],
    *,
    gamma: float | None,
    row_tokens: int,
    anchors_per_row: int,
    device: torch.device,
    dtype: torch.dtype,
    chunk_size: int,
    backend: Backend | None = None,
) -> HeldOutFigures:
    """Score every valid anchor of the documents, `anchors_per_row` blocks at once.

    Without gamma all slots weigh the same. With the row shape, chunk and backend of a training run
    its compiled kernels serve here too. The next row is read from disk while this one is computed.
    """
    weights_K = decayed_weights(drafter.config.block_size, gamma)
    # A slot that weighs nothing in fp32 still counts for accuracy and acceptance.
    weights_K = np.maximum(weights_K, np.finfo(np.float32).tiny)
    total = HeldOutFigures()
    for packed in _read_ahead(_pack(documents, row_tokens)):
        features_SF = torch.zeros(
            packed.num_tokens if device.type == "cpu" else row_tokens,
            packed.features_TF.shape[1],
            dtype=dtype,
            device=device,
        )
        features_SF[: packed.num_tokens] = packed.features_TF.to(device)
        positions_S = torch.zeros(len(features_SF), dtype=torch.int64, device=device)
        positions_S[: packed.num_tokens] = packed.positions_T.to(device)
        context_kv = drafter.context_kv(features_SF, positions_S, backend=backend)
        hits = []
        for anchors in _cut(packed.anchors, anchors_per_row):
            row = build_row(
                packed.documents,
                anchors,
                row_tokens=row_tokens,
                anchors_per_row=anchors_per_row,
                block_size=drafter.config.block_size,
                slot_weights=[weights_K] * len(packed.documents),
            )
            batch = to_batch(row, features_SF, Position(), device)
            hidden_NKH = row_hidden(drafter, frozen, batch, context_kv, backend=backend)
            losses_M, right_M = score(
                hidden_NKH.flatten(0, 1).index_select(0, batch.scored_M),
                frozen.head_VH,
                batch.labels_M,
                chunk_size=min(chunk_size, _LARGEST_CHUNK),
            )
            hits.append(_hits(row, right_M.cpu().numpy()))
            total += HeldOutFigures(
                num_anchors=row.num_anchors,
                loss_sum=float((losses_M * batch.weights_M).sum(dtype=torch.float64)),
                weight_sum=batch.weight_sum,
                correct_K=tuple(hits[-1].sum(0).tolist()),
                scored_K=tuple((row.weights_NK > 0).sum(0).tolist()),
            )
        total += _acceptance(packed, np.concatenate(hits) if hits else None)
    return total


def score(
    hidden_MH: torch.Tensor, head_VH: torch.Tensor, labels_M: torch.Tensor, *, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 cross-entropies [M] and whether the drafted tokens are the labels [M].

    A draft is the argmax, as in decoding. Training's loss calls a label right that shares the
    largest logit with others, which in bf16 is common and would flatter the acceptance length.
    """
    losses_M = torch.empty(len(hidden_MH), device=hidden_MH.device)
    right_M = torch.empty_like(labels_M, dtype=torch.bool)
    for start in range(0, len(hidden_MH), chunk_size):
        chunk = slice(start, start + chunk_size)
        logits_CV = hidden_MH[chunk] @ head_VH.T
        right_M[chunk] = logits_CV.argmax(-1) == labels_M[chunk]
        losses_M[chunk] = F.cross_entropy(logits_CV.float(), labels_M[chunk], reduction="none")
    return losses_M, right_M


@dataclass(frozen=True, kw_only=True, eq=False)
class _Packed:
    documents: list[RowDocument]
    anchors: list[npt.NDArray[np.int64]]
    """valid anchors of each document"""
    features_TF: torch.Tensor
    """states of all documents end to end, on the host"""
    positions_T: torch.Tensor
    """place of each token in its document"""

    @property
    def num_tokens(self) -> int:
        return len(self.features_TF)


def _pack(documents: Iterable[RecordedDocument], row_tokens: int) -> Iterator[_Packed]:
    group: list[RecordedDocument] = []
    num_tokens = 0
    for document in documents:
        length = len(document.input_ids)
        if group and num_tokens + length > row_tokens:
            yield _read(group)
            group, num_tokens = [], 0
        group.append(document)
        num_tokens += length
    if group:
        yield _read(group)


def _read(group: list[RecordedDocument]) -> _Packed:
    masks = [document.loss_mask for document in group]
    return _Packed(
        documents=[
            RowDocument(document_id=i, input_ids_T=document.input_ids, loss_mask_T=mask_T)
            for i, (document, mask_T) in enumerate(zip(group, masks, strict=True))
        ],
        anchors=[valid_anchors(mask_T) for mask_T in masks],
        features_TF=torch.cat([document.torch().hidden_states.flatten(1) for document in group]),
        positions_T=torch.cat([torch.arange(len(mask_T)) for mask_T in masks]),
    )


def _read_ahead(rows: Iterator[_Packed]) -> Iterator[_Packed]:
    with ThreadPoolExecutor(1, thread_name_prefix="held-out") as pool:
        ahead = pool.submit(next, rows, None)
        while (row := ahead.result()) is not None:
            ahead = pool.submit(next, rows, None)
            yield row


def _cut(anchors: list[npt.NDArray[np.int64]], size: int) -> Iterator[list[npt.NDArray[np.int64]]]:
    """Yield `size` anchors at a time, all documents in order; each time one array per document."""
    edges = np.cumsum([0] + [len(anchors_A) for anchors_A in anchors])
    for start in range(0, int(edges[-1]), size):
        cuts = np.clip(np.stack([edges[:-1], edges[1:]]), start, start + size) - edges[:-1]
        yield [anchors_A[a:b] for anchors_A, a, b in zip(anchors, *cuts, strict=True)]


def _hits(row: Row, right_M: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which slots of the row's blocks are right, [A, K]; what is not scored is not."""
    hits_NK = np.zeros(row.weights_NK.shape, bool)
    hits_NK.reshape(-1)[row.scored_M] = right_M
    return hits_NK[: row.num_anchors]


def _acceptance(packed: _Packed, hits_AK: npt.NDArray[np.bool_] | None) -> HeldOutFigures:
    # Slots past a span's end are not scored, and decoding would never commit them.
    parts, first = [], 0
    for document, anchors_A in zip(packed.documents, packed.anchors, strict=True):
        num_matches_T = np.zeros(len(document.loss_mask_T), np.int64)
        if hits_AK is not None:
            own_AK = hits_AK[first : first + len(anchors_A)]
            num_matches_T[anchors_A] = np.cumprod(own_AK, axis=1, dtype=np.int64).sum(axis=1)
        parts.append(document_acceptance(num_matches_T, document.loss_mask_T))
        first += len(anchors_A)
    return HeldOutFigures(num_documents=len(packed.documents), acceptance=sum(parts, Acceptance()))
