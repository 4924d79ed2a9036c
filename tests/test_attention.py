"""Block attention against a dense mask over [row context + all blocks]."""

import math

import pytest
import torch

from trainer.attention import block_attention, plan_attention

# Two documents (0-4, 5-11), one block at the very start of each, and two empty slots at the end.
STARTS = torch.tensor([0, 0, 0, 5, 5, 0, 0])
ENDS = torch.tensor([0, 2, 4, 5, 11, 0, 0])
NUM_CONTEXT, BLOCK, HEADS, KEY_HEADS, WIDTH = 12, 3, 4, 2, 8


def inputs(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        )

    n = len(STARTS)
    return [
        draw(n, BLOCK, HEADS, WIDTH),
        draw(NUM_CONTEXT, KEY_HEADS, WIDTH),
        draw(NUM_CONTEXT, KEY_HEADS, WIDTH),
        draw(n, BLOCK, KEY_HEADS, WIDTH),
        draw(n, BLOCK, KEY_HEADS, WIDTH),
    ]


def attend(tensors, backend, window=None):
    plan = plan_attention(
        STARTS,
        ENDS,
        num_context=NUM_CONTEXT,
        block_size=BLOCK,
        queries_per_key_head=HEADS // KEY_HEADS,
        dtype=tensors[0].dtype,
        backend=backend,
        window=window,
    )
    return block_attention(*tensors, plan)


def dense_reference(q, k_context, v_context, k_block, v_block, window=None):
    # One query at a time: collect the keys that it may see, softmax, add up.
    out = torch.zeros_like(q)
    for n, (start, end) in enumerate(zip(STARTS.tolist(), ENDS.tolist(), strict=True)):
        for head in range(HEADS):
            key_head = head // (HEADS // KEY_HEADS)
            for slot in range(BLOCK):
                first, own = start, range(BLOCK)
                if window is not None:  # position of a slot: end + slot
                    first = max(start, min(end, end + slot - (window - 1)))
                    own = range(max(0, slot - (window - 1)), slot + 1)
                own = slice(own.start, own.stop)
                keys = torch.cat([k_context[first:end, key_head], k_block[n, own, key_head]])
                values = torch.cat([v_context[first:end, key_head], v_block[n, own, key_head]])
                scores = keys @ q[n, slot, head] / math.sqrt(WIDTH)
                out[n, slot, head] = scores.softmax(0) @ values
    return out


# Wider than any context, cut in every document, within the block, the slot alone.
@pytest.mark.parametrize("window", [None, 100, 4, 2, 1])
@pytest.mark.parametrize("backend", ["split", "sdpa"])
def test_backend_equals_the_dense_reference_with_gradients(backend, window):
    tensors, copies = inputs(), inputs()
    out, expected = attend(tensors, backend, window), dense_reference(*copies, window)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    upstream = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, tensors, upstream)
    expected_grads = torch.autograd.grad(expected, copies, upstream)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["split", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_block_may_not_see_changes_nothing_at_all(backend, dtype):
    tensors = inputs(dtype)
    before = attend(tensors, backend)
    block = 2  # sees context 0..3 of the first document
    with torch.no_grad():
        for tensor in tensors[1:3]:
            tensor[4:] += 3.0  # its anchor position, later ones and the other document
        for tensor in (tensors[0], tensors[3], tensors[4]):
            tensor[:block] -= 2.0
            tensor[block + 1 :] -= 2.0
    after = attend(tensors, backend)
    assert torch.equal(before[block], after[block])
    with torch.no_grad():
        tensors[2][3] += 3.0  # the position just before the anchor
    assert not torch.equal(after[block], attend(tensors, backend)[block])


@pytest.mark.parametrize("backend", ["split", "sdpa"])
def test_gradient_of_one_block_is_zero_outside_its_interval(backend):
    tensors = inputs(torch.float32)
    attend(tensors, backend)[2].square().sum().backward()
    q, k_context, v_context, k_block, v_block = (tensor.grad for tensor in tensors)
    for grad in (k_context, v_context):
        assert grad[4:].count_nonzero() == 0
        assert grad[:4].count_nonzero() > 0
    for grad in (q, k_block, v_block):
        assert grad[:2].count_nonzero() == 0
        assert grad[3:].count_nonzero() == 0


@pytest.mark.parametrize("backend", ["split", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sliding_slot_sees_neither_later_slots_nor_what_is_out_of_its_window(backend, dtype):
    tensors, window, block = inputs(dtype), 3, 4  # its anchor: row position 11
    before = attend(tensors, backend, window)[block]
    with torch.no_grad():
        tensors[1][:10] += 3.0  # slot 1 sees positions 10, 11 (slot 0) and 12 (itself)
        tensors[2][:10] += 3.0
        tensors[3][block, 2] += 3.0
        tensors[4][block, 2] += 3.0
    after = attend(tensors, backend, window)[block]
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])  # which sees position 9
    with torch.no_grad():
        tensors[2][10] += 3.0
    assert not torch.equal(after[1], attend(tensors, backend, window)[block][1])


@pytest.mark.parametrize("backend", ["split", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 2])
def test_empty_slots_are_finite_and_give_no_gradient(backend, dtype, window):
    tensors = inputs(dtype)
    out = attend(tensors, backend, window)
    assert out.isfinite().all()
    (out[-2:] * 0.0).sum().backward()
    for tensor in tensors:
        assert tensor.grad.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_agree(dtype):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    split, sdpa = attend(inputs(dtype), "split"), attend(inputs(dtype), "sdpa")
    torch.testing.assert_close(split, sdpa, rtol=tolerance, atol=tolerance)


def test_documents_are_grouped_once_each():
    plan = plan_attention(
        STARTS, ENDS, num_context=NUM_CONTEXT, block_size=BLOCK, queries_per_key_head=2,
        dtype=torch.float32, backend="split",
    )  # fmt: skip
    groups = [(d.first_block, d.last_block, d.context_start, d.context_end) for d in plan.documents]
    assert groups == [(0, 3, 0, 4), (3, 5, 5, 11), (5, 7, 0, 0)]
