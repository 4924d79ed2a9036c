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
import torch.nn.functional as F

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
    """Return (sum of weight * loss, sum of `weights_M`, whether each slot is right [M]).

    A slot is right when no token has a larger logit than its label: equal ones count as right, for
    to tell them apart takes one more pass. The loss is the cross-entropy of the labels; with
    `teacher_MH`, normed hidden states of the target, it is KL(teacher || drafter), both over the
    whole vocabulary. `reweight` takes the losses [M] and returns factors [M] on the weights, which
    get no gradient; the returned sum of weights, by which one divides, does not have them.

    Logits are computed in the common dtype of `hidden_MH` and `head_VH` (bf16 in training), the
    log-sum-exp in fp32. Both sums are fp32 scalars and 0 for an empty input; the first is
    differentiable with respect to `hidden_MH` only. The caller drops slots of weight 0 beforehand
    (`Row.scored_M`); those that are passed cost time and add exactly nothing.

    `compiled` fuses the softmax, for a GPU: it is compiled once for each `chunk_size`, whatever M.
    """
    loss_sum, right_M = _FrozenHeadCrossEntropy.apply(
        hidden_MH, head_VH, labels_M, weights_M.float(), chunk_size, compiled, teacher_MH, reweight
    )
    return loss_sum, weights_M.float().sum(), right_M


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
        right_M = torch.empty_like(labels_M, dtype=torch.bool)
        grad_MH = torch.empty_like(hidden_MH) if needs_grad else None

        for start in range(0, num_slots, chunk_size):
            chunk = slice(start, min(start + chunk_size, num_slots))
            size = chunk.stop - start
            logits = logits_CV[:size]
            torch.mm(hidden_MH[chunk], head_VH.T, out=logits)
            labels = labels_M[chunk]
            if compiled:
                labels = F.pad(labels, (0, chunk_size - size))
            if teacher_MH is not None:
                assert teacher_CV is not None
                teacher = teacher_CV[:size]
                torch.mm(teacher_MH[chunk], head_VH.T, out=teacher)
                if compiled:
                    losses, right = fused_divergence(logits_CV, teacher_CV, labels, compiled=True)
                else:
                    losses, right = _divergence_in_strips(logits, teacher, labels)
            elif compiled:
                losses, right = _fused_softmax(logits_CV, labels)
            else:
                losses, right = _softmax_in_strips(logits, labels, wide, needs_grad)
            losses_M[chunk], right_M[chunk] = losses[:size], right[:size]
            if grad_MH is not None:
                torch.mm(logits, head_VH, out=grad_MH[chunk])

        if reweight is not None:
            weights_M = weights_M * reweight(losses_M)
        if grad_MH is not None:
            # Weighting after the product is a pass over H, before it one over V; and only after the
            # last chunk is every loss of a block known.
            grad_MH *= weights_M[:, None]
        ctx.save_for_backward(grad_MH)
        ctx.mark_non_differentiable(right_M)
        return (losses_M * weights_M).sum(dtype=wide), right_M

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: Any) -> Any:
        (grad_MH,) = ctx.saved_tensors
        return (grad_MH * grad_loss.to(grad_MH.dtype), *[None] * 7)


def fused_softmax(
    logits_CV: torch.Tensor, labels_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses and whether labels are on top; overwrite the logits by d loss / d logits.

    Written for a compiler: one pass finds maximum and sum, a second one writes. Rows that were
    never filled give garbage, which the caller does not look at.
    """
    wide_CV = logits_CV.float()
    top_C = wide_CV.amax(-1)
    lse_C = top_C + (wide_CV - top_C[:, None]).exp().sum(-1).log()
    of_label_C = wide_CV.gather(1, labels_C[:, None])[:, 0]
    is_label_CV = torch.arange(wide_CV.shape[1], device=wide_CV.device) == labels_C[:, None]
    logits_CV.copy_((wide_CV - lse_C[:, None]).exp() - is_label_CV.float())
    return lse_C - of_label_C, of_label_C >= top_C


def fused_divergence(
    logits_CV: torch.Tensor,
    teacher_CV: torch.Tensor,
    labels_C: torch.Tensor,
    *,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return KL(teacher || drafter) and whether labels are on top; overwrite the logits by its
    gradient to them.

    Two pieces, each written for a compiler: as one it would write the gradient aside and copy it,
    because the loss reads the logits in the same pass.
    """
    measure = _compiled_divergence if compiled else _divergence
    overwrite = _compiled_overwrite if compiled else _overwrite_by_difference
    losses_C, right_C, lse_C, teacher_lse_C = measure(logits_CV, teacher_CV, labels_C)
    overwrite(logits_CV, teacher_CV, lse_C, teacher_lse_C)
    return losses_C, right_C


def _divergence(
    logits_CV: torch.Tensor, teacher_CV: torch.Tensor, labels_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    # Returns losses, whether labels are on top, and log-sum-exps of both.
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    wide_CV, teacher_CV = logits_CV.to(wide), teacher_CV.to(wide)
    right_C = wide_CV.gather(1, labels_C[:, None])[:, 0] >= wide_CV.amax(-1)
    lse_C, teacher_lse_C = _log_sum_exp(wide_CV), _log_sum_exp(teacher_CV)
    log_p_CV, log_q_CV = teacher_CV - teacher_lse_C[:, None], wide_CV - lse_C[:, None]
    losses_C = (log_p_CV.exp() * (log_p_CV - log_q_CV)).sum(-1)
    return losses_C, right_C, lse_C, teacher_lse_C


def _log_sum_exp(wide_CV: torch.Tensor) -> torch.Tensor:
    top_C = wide_CV.amax(-1)
    return top_C + (wide_CV - top_C[:, None]).exp().sum(-1).log()


def _overwrite_by_difference(
    logits_CV: torch.Tensor,
    teacher_CV: torch.Tensor,
    lse_C: torch.Tensor,
    teacher_lse_C: torch.Tensor,
) -> None:
    q_CV = (logits_CV.to(lse_C.dtype) - lse_C[:, None]).exp()
    logits_CV.copy_(q_CV - (teacher_CV.to(lse_C.dtype) - teacher_lse_C[:, None]).exp())


_compiled_divergence = torch.compile(_divergence, fullgraph=True, dynamic=False)
_compiled_overwrite = torch.compile(_overwrite_by_difference, fullgraph=True, dynamic=False)
_fused_softmax = torch.compile(fused_softmax, fullgraph=True, dynamic=False)


def _divergence_in_strips(
    logits_CV: torch.Tensor, teacher_CV: torch.Tensor, labels_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # The fp32 copies of a strip stay in a CPU's cache.
    strips = zip(
        logits_CV.split(_CPU_STRIP_ROWS),
        teacher_CV.split(_CPU_STRIP_ROWS),
        labels_C.split(_CPU_STRIP_ROWS),
        strict=True,
    )
    losses, right = zip(*(fused_divergence(*strip) for strip in strips), strict=True)
    return torch.cat(losses), torch.cat(right)


def _softmax_in_strips(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, wide: torch.dtype, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    num_slots = len(logits_CV)
    strip_rows = min(_CPU_STRIP_ROWS, num_slots) if logits_CV.is_cpu else num_slots
    scratch_RV = logits_CV.new_empty(strip_rows, logits_CV.shape[1], dtype=wide)
    losses_C = logits_CV.new_empty(num_slots, dtype=wide)
    right_C = torch.empty_like(labels_C, dtype=torch.bool)
    for row in range(0, num_slots, strip_rows):
        strip = slice(row, min(row + strip_rows, num_slots))
        losses_C[strip], right_C[strip] = _softmax_strip(
            logits_CV[strip], labels_C[strip], scratch_RV[: strip.stop - row], needs_grad
        )
    return losses_C, right_C


def _softmax_strip(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, scratch_RV: torch.Tensor, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    # Returns losses and whether labels are on top; with needs_grad overwrites the logits by
    # d loss / d logits.
    scratch_RV.copy_(logits_RV)
    top_R1 = scratch_RV.amax(-1, keepdim=True)
    label_logits_R1 = scratch_RV.gather(1, labels_R[:, None])
    torch.softmax(scratch_RV, -1, out=scratch_RV)
    # log-sum-exp from the largest probability, which is at least 1 / V and never underflows.
    lse_R1 = top_R1 - scratch_RV.amax(-1, keepdim=True).log()
    if needs_grad:
        minus_one = scratch_RV.new_full((1, 1), -1.0).expand(len(labels_R), 1)
        scratch_RV.scatter_add_(1, labels_R[:, None], minus_one)
        logits_RV.copy_(scratch_RV)
    return (lse_R1 - label_logits_R1)[:, 0], (label_logits_R1 >= top_R1)[:, 0]
