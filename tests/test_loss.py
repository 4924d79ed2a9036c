"""The frozen-head loss against plain cross-entropy and divergence, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from trainer.loss import frozen_head_cross_entropy, fused_divergence, fused_softmax

NUM_SLOTS, VOCAB, HIDDEN = 77, 101, 12


def inputs(dtype, seed=0, num_slots=NUM_SLOTS):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_slots, HIDDEN, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (num_slots,), generator=generator)
    labels[::7] = (hidden @ head.T).argmax(-1)[::7]
    weights = torch.rand(num_slots, generator=generator)
    weights[::5] = 0.0
    return hidden, head, labels, weights


def naive(hidden, head, labels, weights):
    losses = F.cross_entropy((hidden @ head.T).double(), labels, reduction="none")
    return (losses * weights).sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_size", [1, 10, 33, 77, 1000])
def test_loss_and_gradient_equal_plain_cross_entropy(dtype, chunk_size):
    hidden, head, labels, weights = inputs(dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    loss_sum, weight_sum, right = frozen_head_cross_entropy(
        hidden, head, labels, weights, chunk_size=chunk_size
    )
    (3.0 * loss_sum).backward()
    copy = hidden.detach().double().requires_grad_()
    expected = naive(copy, head.double(), labels, weights.double())
    (3.0 * expected).backward()
    torch.testing.assert_close(loss_sum.double(), expected, rtol=tolerance, atol=0)
    torch.testing.assert_close(hidden.grad.double(), copy.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(weight_sum, weights.sum())
    assert torch.equal(right, (hidden @ head.T).argmax(-1) == labels)


def test_bf16_is_close_to_fp32():
    hidden, head, labels, weights = inputs(torch.bfloat16)
    loss_sum, _, _ = frozen_head_cross_entropy(hidden, head, labels, weights, chunk_size=20)
    loss_sum.backward()
    exact = hidden.detach().float().requires_grad_()
    expected = naive(exact, head.float(), labels, weights)
    expected.backward()
    assert loss_sum.dtype == torch.float32
    assert abs(loss_sum.item() / expected.item() - 1) < 2e-3
    assert (hidden.grad.float() - exact.grad).norm() < 1e-2 * exact.grad.norm()


def test_slots_of_weight_zero_add_exactly_nothing():
    hidden, head, labels, weights = inputs(torch.float32)
    kept = weights > 0
    loss_sum, weight_sum, _ = frozen_head_cross_entropy(
        hidden, head, labels, weights, chunk_size=16
    )
    loss_sum.backward()
    few = hidden.detach()[kept].requires_grad_()
    few_loss, few_weight, _ = frozen_head_cross_entropy(
        few, head, labels[kept], weights[kept], chunk_size=16
    )
    few_loss.backward()
    torch.testing.assert_close(loss_sum, few_loss)
    torch.testing.assert_close(weight_sum, few_weight)
    torch.testing.assert_close(hidden.grad[kept], few.grad)
    assert hidden.grad[~kept].count_nonzero() == 0


def test_all_weights_zero_gives_zero_loss_and_gradient():
    hidden, head, labels, weights = inputs(torch.float32)
    loss_sum, weight_sum, _ = frozen_head_cross_entropy(
        hidden, head, labels, weights * 0, chunk_size=16
    )
    loss_sum.backward()
    assert loss_sum.item() == 0.0
    assert weight_sum.item() == 0.0
    assert hidden.grad.count_nonzero() == 0


def test_empty_input_gives_zeros():
    hidden, head, labels, weights = inputs(torch.bfloat16, num_slots=0)
    loss_sum, weight_sum, right = frozen_head_cross_entropy(
        hidden, head, labels, weights, chunk_size=16
    )
    loss_sum.backward()
    assert loss_sum.item() == 0.0
    assert weight_sum.item() == 0.0
    assert right.shape == (0,)
    assert hidden.grad.shape == (0, HIDDEN)


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    head = torch.tensor([[1.0], [-1.0], [0.0]])
    loss_sum, _, _ = frozen_head_cross_entropy(
        hidden, head, torch.tensor([1, 1]), torch.ones(2), chunk_size=2
    )
    loss_sum.backward()
    torch.testing.assert_close(loss_sum.item(), 600.0)
    torch.testing.assert_close(hidden.grad, torch.tensor([[2.0], [0.0]]))


def test_no_gradient_is_formed_in_evaluation():
    hidden, head, labels, weights = inputs(torch.float32)
    trained, *_ = frozen_head_cross_entropy(hidden, head, labels, weights, chunk_size=16)
    with torch.no_grad():
        evaluated, *_ = frozen_head_cross_entropy(hidden, head, labels, weights, chunk_size=16)
    assert not evaluated.requires_grad
    torch.testing.assert_close(evaluated, trained.detach())


def test_gradients_of_parts_with_one_division_equal_the_big_batch():
    hidden, head, labels, weights = inputs(torch.float64, num_slots=56)
    whole, whole_weight, _ = frozen_head_cross_entropy(hidden, head, labels, weights, chunk_size=64)
    (whole / whole_weight).backward()
    parts = hidden.detach().clone().requires_grad_()
    weight_sum = weights.sum()
    for part in torch.arange(56).split([1, 2, 50, 3]):
        loss_sum, _, _ = frozen_head_cross_entropy(
            parts[part], head, labels[part], weights[part], chunk_size=64
        )
        (loss_sum / weight_sum).backward()
    torch.testing.assert_close(parts.grad, hidden.grad, rtol=1e-10, atol=1e-14)


def test_fused_softmax_gives_losses_right_slots_and_gradients():
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(9, VOCAB, generator=generator)).requires_grad_()
    labels = torch.randint(0, VOCAB, (9,), generator=generator)
    labels[:4] = logits[:4].argmax(-1)
    expected = F.cross_entropy(logits, labels, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    overwritten = logits.detach().clone()
    losses, right = fused_softmax(overwritten, labels)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(overwritten, gradient, rtol=1e-5, atol=1e-6)
    assert torch.equal(right, logits.argmax(-1) == labels)
    assert right.any()
    assert not right.all()


def teacher_of(hidden, seed=9):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(hidden.shape, generator=generator).to(hidden.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_size", [1, 33, 1000])
def test_soft_labels_give_the_divergence_from_the_teacher(dtype, chunk_size):
    hidden, head, labels, weights = inputs(dtype)
    teacher = teacher_of(hidden)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    loss_sum, weight_sum, right = frozen_head_cross_entropy(
        hidden, head, labels, weights, chunk_size=chunk_size, teacher_MH=teacher
    )
    (3.0 * loss_sum).backward()
    copy = hidden.detach().double().requires_grad_()
    expected = F.kl_div(
        (copy @ head.double().T).log_softmax(-1),
        (teacher.double() @ head.double().T).softmax(-1),
        reduction="none",
    ).sum(-1)
    expected = (expected * weights.double()).sum()
    (3.0 * expected).backward()
    torch.testing.assert_close(loss_sum.double(), expected, rtol=tolerance, atol=0)
    torch.testing.assert_close(hidden.grad.double(), copy.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(weight_sum, weights.sum())
    assert torch.equal(right, (hidden @ head.T).argmax(-1) == labels)


def test_a_drafter_that_equals_the_teacher_has_no_loss_and_no_gradient():
    hidden, head, labels, weights = inputs(torch.float64)
    loss_sum, *_ = frozen_head_cross_entropy(
        hidden, head, labels, weights, chunk_size=10, teacher_MH=hidden.detach()
    )
    loss_sum.backward()
    assert abs(loss_sum.item()) < 1e-12
    assert hidden.grad.abs().max() < 1e-14


def test_fused_divergence_gives_losses_right_slots_and_gradients():
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(9, VOCAB, generator=generator)).requires_grad_()
    teacher = 5 * torch.randn(9, VOCAB, generator=generator)
    labels = logits.argmax(-1).clone()
    labels[4:] = 0
    expected = F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    overwritten = logits.detach().clone()
    losses, right = fused_divergence(overwritten, teacher, labels)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(overwritten, gradient, rtol=1e-5, atol=1e-6)
    assert torch.equal(right, logits.argmax(-1) == labels)
    assert right.any()
    assert not right.all()
