"""Loss through the frozen head, chunk by chunk, without keeping the logits.

Takes hidden states, the target's head, and labels or what the target says there; hands back a loss
SUM and a weight SUM, never a mean: the caller adds both over micro-batches and ranks and divides
once. The gradient of the hidden states is formed in the forward pass, while a chunk's logits are
still there, so nothing is computed twice and memory holds one chunk of logits (two with a teacher).

Axes: M scored slots, V vocabulary, H hidden, C slots of one chunk, R rows of one softmax strip.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# On a CPU a strip of 32 x 49,152 fp32 (6 MB) stays in cache through all passes of the softmax; a
# whole chunk would go through memory five times (measured: 6.5 against 15 ms for 448 rows).
_CPU_STRIP_ROWS = 32


def frozen_head_cross_entropy(
    hidden_MH: torch.Tensor,
    head_VH: torch.Tensor,
    labels_M: torch.Tensor,
    weights_M: torch.Tensor,
    *,
    chunk_size: int,
    compiled: bool = False,
    teacher_MH: torch.Tensor | None = None,
    reweight: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (sum of weight * loss, sum of `weights_M`, predicted ids [M]).

    The loss is the cross-entropy of the labels; with `teacher_MH`, normed hidden states of the
    target, it is KL(teacher || drafter), both over the whole vocabulary. `reweight` takes the
    losses [M] and returns factors [M] on the weights, which get no gradient; the returned sum of
    weights, by which one divides, does not have them.

    Logits are computed in the common dtype of `hidden_MH` and `head_VH` (bf16 in training), the
    log-sum-exp in fp32. Both sums are fp32 scalars and 0 for an empty input; the first is
    differentiable with respect to `hidden_MH` only. The caller drops slots of weight 0 beforehand
    (`Row.scored_M`); those that are passed cost time and add exactly nothing.

    `compiled` fuses the softmax, for a GPU: it is compiled once for each `chunk_size`, whatever M.
    """
    loss_sum, predicted_M = _FrozenHeadCrossEntropy.apply(
        hidden_MH, head_VH, labels_M, weights_M.float(), chunk_size, compiled, teacher_MH, reweight
    )
    return loss_sum, weights_M.float().sum(), predicted_M


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: torch.Tensor,
        head_VH: torch.Tensor,
        labels_M: torch.Tensor,
        weights_M: torch.Tensor,
        chunk_size: int,
        compiled: bool,
        teacher_MH: torch.Tensor | None,
        reweight: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert hidden_MH.dtype == head_VH.dtype, "cast the frozen head once, outside the loop"
        num_slots, vocab_size = len(hidden_MH), len(head_VH)
        if not compiled:
            chunk_size = min(chunk_size, max(1, num_slots))
        wide = torch.promote_types(hidden_MH.dtype, torch.float32)
        needs_grad = ctx.needs_input_grad[0]

        logits_CV = hidden_MH.new_empty(chunk_size, vocab_size)
        teacher_CV = torch.empty_like(logits_CV) if teacher_MH is not None else None
        losses_M = hidden_MH.new_empty(num_slots, dtype=wide)
        predicted_M = torch.empty_like(labels_M)
        grad_MH = torch.empty_like(hidden_MH) if needs_grad else None

        for start in range(0, num_slots, chunk_size):
            chunk = slice(start, min(start + chunk_size, num_slots))
            size = chunk.stop - start
            logits = logits_CV[:size]
            torch.mm(hidden_MH[chunk], head_VH.T, out=logits)
            if teacher_MH is not None:
                assert teacher_CV is not None
                teacher = teacher_CV[:size]
                torch.mm(teacher_MH[chunk], head_VH.T, out=teacher)
                if compiled:
                    losses, predicted = _fused_divergence(logits_CV, teacher_CV)
                else:
                    losses, predicted = _divergence_in_strips(logits, teacher, wide)
            elif compiled:
                labels_C = labels_M.new_zeros(chunk_size)
                labels_C[:size] = labels_M[chunk]
                losses, predicted = _fused_softmax(logits_CV, labels_C)
            else:
                losses, predicted = _softmax_in_strips(logits, labels_M[chunk], wide, needs_grad)
            losses_M[chunk], predicted_M[chunk] = losses[:size], predicted[:size]
            if grad_MH is not None:
                torch.mm(logits, head_VH, out=grad_MH[chunk])

        if reweight is not None:
            weights_M = weights_M * reweight(losses_M)
        if grad_MH is not None:
            # Weighting after the product is a pass over H, before it one over V; and only after the
            # last chunk is every loss of a block known.
            grad_MH *= weights_M[:, None]
        ctx.save_for_backward(grad_MH)
        ctx.mark_non_differentiable(predicted_M)
        return (losses_M * weights_M).sum(dtype=wide), predicted_M

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: Any) -> Any:
        (grad_MH,) = ctx.saved_tensors
        return (grad_MH * grad_loss.to(grad_MH.dtype), *[None] * 7)


def fused_softmax(
    logits_CV: torch.Tensor, labels_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses and argmax, and overwrite the logits by d loss / d logits.

    Written for a compiler: one pass finds maximum, sum and argmax, a second one writes. Rows that
    were never filled give garbage, which the caller does not look at.
    """
    wide_CV = logits_CV.float()
    top_C, predicted_C = wide_CV.amax(-1), wide_CV.argmax(-1)
    lse_C = top_C + (wide_CV - top_C[:, None]).exp().sum(-1).log()
    losses_C = lse_C - wide_CV.gather(1, labels_C[:, None])[:, 0]
    is_label_CV = torch.arange(wide_CV.shape[1], device=wide_CV.device) == labels_C[:, None]
    logits_CV.copy_((wide_CV - lse_C[:, None]).exp() - is_label_CV.float())
    return losses_C, predicted_C


def fused_divergence(
    logits_CV: torch.Tensor, teacher_CV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return KL(teacher || drafter) and argmax, and overwrite the logits by its gradient to them.

    Written for a compiler, as `fused_softmax`.
    """
    wide_CV, teacher_CV = logits_CV.float(), teacher_CV.float()
    predicted_C = wide_CV.argmax(-1)
    log_q_CV, log_p_CV = wide_CV.log_softmax(-1), teacher_CV.log_softmax(-1)
    p_CV = log_p_CV.exp()
    losses_C = (p_CV * (log_p_CV - log_q_CV)).sum(-1)
    logits_CV.copy_(log_q_CV.exp() - p_CV)
    return losses_C, predicted_C


_fused_softmax = torch.compile(fused_softmax, fullgraph=True, dynamic=False)
_fused_divergence = torch.compile(fused_divergence, fullgraph=True, dynamic=False)


def _divergence_in_strips(
    logits_CV: torch.Tensor, teacher_CV: torch.Tensor, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    # As `fused_divergence`, a strip at a time: it needs several fp32 copies of what it works on.
    losses, predicted = [logits_CV.new_empty(0, dtype=wide)], []
    for logits_RV, teacher_RV in zip(
        logits_CV.split(_CPU_STRIP_ROWS), teacher_CV.split(_CPU_STRIP_ROWS), strict=True
    ):
        predicted.append(logits_RV.argmax(-1))
        log_q_RV = logits_RV.log_softmax(-1, dtype=wide)
        log_p_RV = teacher_RV.log_softmax(-1, dtype=wide)
        p_RV = log_p_RV.exp()
        losses.append((p_RV * (log_p_RV - log_q_RV)).sum(-1))
        logits_RV.copy_(log_q_RV.exp_().sub_(p_RV))
    return torch.cat(losses), torch.cat(predicted)


def _softmax_in_strips(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, wide: torch.dtype, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    num_slots = len(logits_CV)
    strip_rows = min(_CPU_STRIP_ROWS, num_slots) if logits_CV.is_cpu else num_slots
    scratch_RV = logits_CV.new_empty(strip_rows, logits_CV.shape[1], dtype=wide)
    losses_C, predicted_C = logits_CV.new_empty(num_slots, dtype=wide), torch.empty_like(labels_C)
    for row in range(0, num_slots, strip_rows):
        strip = slice(row, min(row + strip_rows, num_slots))
        losses_C[strip], predicted_C[strip] = _softmax_strip(
            logits_CV[strip], labels_C[strip], scratch_RV[: strip.stop - row], needs_grad
        )
    return losses_C, predicted_C


def _softmax_strip(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, scratch_RV: torch.Tensor, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    # Returns losses and argmax; with needs_grad overwrites the logits by d loss / d logits.
    scratch_RV.copy_(logits_RV)
    predicted_R1 = scratch_RV.argmax(-1, keepdim=True)
    top_R1 = scratch_RV.gather(1, predicted_R1)
    label_logits_R1 = scratch_RV.gather(1, labels_R[:, None])
    torch.softmax(scratch_RV, -1, out=scratch_RV)
    # log-sum-exp from the largest probability, which is at least 1 / V and never underflows.
    lse_R1 = top_R1 - scratch_RV.gather(1, predicted_R1).log()
    if needs_grad:
        minus_one = scratch_RV.new_full((1, 1), -1.0).expand(len(labels_R), 1)
        scratch_RV.scatter_add_(1, labels_R[:, None], minus_one)
        logits_RV.copy_(scratch_RV)
    return (lse_R1 - label_logits_R1)[:, 0], predicted_R1[:, 0]
