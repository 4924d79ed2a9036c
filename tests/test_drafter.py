"""The drafter against a slow dense reference, itself alone and packed, and z-lab's model."""

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F

from hscache.drafter_sizes import num_parameters
from trainer.drafter import Drafter, lay_out_blocks
from trainer.drafter_config import DrafterConfig
from trainer.drafter_json import drafter_json

CONFIG = DrafterConfig(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position_embeddings=128,
    vocab_size=50,
    block_size=4,
    mask_token_id=3,
    target_layer_ids=(1, 4),
    num_target_layers=8,
)
# As published for 27B: sliding layers, then a full one. Both windows cut contexts; 3, the block.
SLIDING, NARROW = (
    dataclasses.replace(
        CONFIG, layer_types=("sliding_attention", "full_attention"), sliding_window=window
    )
    for window in (6, 3)
)
EVERY_CONFIG = pytest.mark.parametrize(
    "config", [CONFIG, SLIDING, NARROW], ids=["full", "sliding", "narrow"]
)
BLOCK = CONFIG.block_size
LENGTHS = (9, 14)
ANCHORS = ((0, 3, 6), (2, 13))  # within each document; the last block runs past its end


def make_drafter(seed=1, config=CONFIG):
    drafter = Drafter(config, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # norms that differ from one, weights large enough to matter
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.25 * noise)
    return drafter


def make_row(seed=0, num_empty=2):
    """Features, positions, block embeddings and intervals of both documents plus empty slots."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(
        sum(LENGTHS), CONFIG.num_features * CONFIG.hidden_size, generator=generator
    )
    embedding = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator)
    ids = torch.randint(0, CONFIG.vocab_size, (sum(LENGTHS),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    starts, ends, anchor_ids, offset = [], [], [], 0
    for length, anchors in zip(LENGTHS, ANCHORS, strict=True):
        starts += [offset] * len(anchors)
        ends += [offset + anchor for anchor in anchors]
        anchor_ids += [int(ids[offset + anchor]) for anchor in anchors]
        offset += length
    empty = [0] * num_empty
    anchor_ids += empty
    blocks = lay_out_blocks(embedding[[*anchor_ids, CONFIG.mask_token_id]], BLOCK)
    return features, positions, blocks, torch.tensor(starts + empty), torch.tensor(ends + empty)


def run(drafter, features, positions, blocks, starts, ends, **kwargs):
    kv = drafter.context_kv(features, positions)
    return drafter(blocks[:, 0], blocks[-1, 1], kv, starts, ends, **kwargs)


def dense_reference(state, features, positions, blocks, starts, ends, config=CONFIG):
    """Full-matrix forward over [row context | all blocks]: dflash.md 1.1, 1.6, `allow` of 2.1."""
    num_blocks, num_context = len(blocks), len(features)

    def norm(x, name):
        scale = state[name + ".weight"].to(x.dtype)
        return x / (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt() * scale

    def heads(x, name):
        return (x @ state[name + ".weight"].to(x.dtype).T).unflatten(-1, (-1, CONFIG.head_dim))

    def turn(x, at):
        half = CONFIG.head_dim // 2
        out = torch.empty_like(x)
        for i in range(half):
            angle = at.to(x.dtype)[:, None] * CONFIG.rope_theta ** (-2 * i / CONFIG.head_dim)
            a, b = x[..., i], x[..., i + half]
            out[..., i] = a * angle.cos() - b * angle.sin()
            out[..., i + half] = b * angle.cos() + a * angle.sin()
        return out

    block_of_query = torch.arange(num_blocks).repeat_interleave(BLOCK)
    allow = torch.zeros(num_blocks * BLOCK, num_context + num_blocks * BLOCK, dtype=torch.bool)
    for query, n in enumerate(block_of_query.tolist()):
        allow[query, starts[n] : ends[n]] = True
        allow[query, num_context + n * BLOCK : num_context + (n + 1) * BLOCK] = True
    query_at = ((ends - starts)[:, None] + torch.arange(BLOCK)).flatten()
    key_at = torch.cat([positions, query_at])
    back = query_at[:, None] - key_at  # within a document, and `allow` is

    context = norm(features @ state["fc.weight"].to(features.dtype).T, "hidden_norm")
    hidden = blocks.flatten(0, 1)
    for i in range(CONFIG.num_hidden_layers):
        name = f"layers.{i}"
        normed = norm(hidden, f"{name}.input_layernorm")
        both = torch.cat([context, normed])
        q = turn(
            norm(heads(normed, f"{name}.self_attn.q_proj"), f"{name}.self_attn.q_norm"), query_at
        )
        k = turn(norm(heads(both, f"{name}.self_attn.k_proj"), f"{name}.self_attn.k_norm"), key_at)
        v = heads(both, f"{name}.self_attn.v_proj")
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(CONFIG.head_dim)
        visible = allow
        if config.layer_types[i] == "sliding_attention":
            visible = allow & (back >= 0) & (back < config.sliding_window)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        hidden = hidden + attended @ state[f"{name}.self_attn.o_proj.weight"].to(hidden.dtype).T
        normed = norm(hidden, f"{name}.post_attention_layernorm")
        gate, up, down = (
            state[f"{name}.mlp.{part}_proj.weight"].to(hidden.dtype)
            for part in ("gate", "up", "down")
        )
        hidden = hidden + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    return norm(hidden, "norm").view(blocks.shape)[:, 1:]


@EVERY_CONFIG
@pytest.mark.parametrize("backend", ["split", "sdpa"])
def test_drafter_equals_the_dense_mask_reference(backend, config):
    drafter = make_drafter(config=config)
    features, positions, blocks, starts, ends = make_row()
    expected = dense_reference(
        drafter.state_dict(), features.double(), positions, blocks.double(), starts, ends, config
    )
    actual = run(drafter, features, positions, blocks, starts, ends, backend=backend)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@EVERY_CONFIG
def test_parameter_gradients_equal_the_dense_reference(config):
    drafter, row = make_drafter(config=config), make_row()
    run(drafter, *row).square().sum().backward()
    state = {n: p.detach().double().requires_grad_() for n, p in drafter.named_parameters()}
    features, positions, blocks, starts, ends = row
    dense_reference(
        state, features.double(), positions, blocks.double(), starts, ends, config
    ).square().sum().backward()
    for name, parameter in drafter.named_parameters():
        expected = state[name].grad
        scale = expected.abs().max().item()
        torch.testing.assert_close(
            parameter.grad.double(), expected, rtol=0, atol=1e-5 * scale, msg=name
        )


@EVERY_CONFIG
def test_packed_row_equals_each_document_alone(config):
    drafter = make_drafter(config=config)
    features, positions, blocks, starts, ends = make_row()
    packed = run(drafter, features, positions, blocks, starts, ends)
    token, block = 0, 0
    for length, anchors in zip(LENGTHS, ANCHORS, strict=True):
        tokens, own = slice(token, token + length), slice(block, block + len(anchors))
        alone = run(
            drafter,
            features[tokens],
            positions[tokens],
            blocks[own],
            starts[own] - token,
            ends[own] - token,
        )
        torch.testing.assert_close(packed[own], alone, rtol=1e-5, atol=1e-5)
        token, block = token + length, block + len(anchors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_document_changes_a_block_by_exactly_zero(dtype):
    drafter = make_drafter()
    features, positions, blocks, starts, ends = make_row()
    features, blocks = features.to(dtype), blocks.to(dtype)

    def loss_and_gradients(features, blocks):
        drafter.zero_grad()
        hidden = run(drafter, features, positions, blocks, starts, ends)
        hidden[3:5].float().square().sum().backward()  # the second document's blocks
        return hidden[3:5].detach(), [p.grad.clone() for p in drafter.layers[1].parameters()]

    before, grads = loss_and_gradients(features, blocks)
    changed, changed_blocks = features.clone(), blocks.clone()
    changed[: LENGTHS[0]] += 1.0
    changed_blocks[:3, 0] += 1.0
    after, changed_grads = loss_and_gradients(changed, changed_blocks)
    assert torch.equal(before, after)
    assert all(torch.equal(a, b) for a, b in zip(grads, changed_grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_count_strictly_before_the_anchor(dtype):
    drafter = make_drafter()
    features, positions, blocks, starts, ends = make_row()
    features, blocks = features.to(dtype), blocks.to(dtype)
    before = run(drafter, features, positions, blocks, starts, ends)
    block = 2
    anchor = int(ends[block])
    at_anchor = features.clone()
    at_anchor[anchor:] += 1.0
    assert torch.equal(
        run(drafter, at_anchor, positions, blocks, starts, ends)[block], before[block]
    )
    just_before = features.clone()
    just_before[anchor - 1] += 1.0
    changed = run(drafter, just_before, positions, blocks, starts, ends)[block]
    assert not torch.equal(changed, before[block])


def test_context_in_pieces_equals_the_whole():
    drafter = make_drafter()
    features, positions, *_ = make_row()
    whole = drafter.context_kv(features, positions)
    pieces = [
        drafter.context_kv(features[a:b], positions[a:b]) for a, b in ((0, 1), (1, 9), (9, 23))
    ]
    for layer, (k, v) in enumerate(whole):
        torch.testing.assert_close(
            torch.cat([p[layer][0] for p in pieces]), k, rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(
            torch.cat([p[layer][1] for p in pieces]), v, rtol=1e-5, atol=1e-6
        )


@EVERY_CONFIG
def test_decoding_step_by_step_equals_training_on_the_whole_row(config):
    drafter = make_drafter(config=config)
    features, positions, blocks, starts, ends = make_row()
    trained = run(drafter, features, positions, blocks, starts, ends)
    for n in (1, 2):  # blocks of the first document, its context grown one token at a time
        pieces = [
            drafter.context_kv(features[t : t + 1], positions[t : t + 1])
            for t in range(int(ends[n]))
        ]
        kv = [
            (torch.cat([p[i][0] for p in pieces]), torch.cat([p[i][1] for p in pieces]))
            for i in range(CONFIG.num_hidden_layers)
        ]
        anchor, mask = blocks[n : n + 1, 0], blocks[-1, 1]
        decoded = drafter(anchor, mask, kv, torch.tensor([0]), ends[n : n + 1])
        torch.testing.assert_close(decoded[0], trained[n], rtol=1e-5, atol=1e-5)


def test_empty_slots_are_finite_and_give_no_gradient():
    drafter, row = make_drafter(), make_row()
    hidden = run(drafter, *row)
    assert hidden.isfinite().all()
    (hidden[-2:] * 0.0).sum().backward()
    assert all(p.grad.count_nonzero() == 0 for p in drafter.parameters())


def test_gradients_are_fp32_and_add_up_in_fp32_under_bf16_features():
    drafter = make_drafter()
    features, positions, blocks, starts, ends = make_row()
    row = (features.bfloat16(), positions, blocks.bfloat16(), starts, ends)
    for _ in range(2):
        hidden = run(drafter, *row)
        assert hidden.dtype == torch.bfloat16
        hidden.float().sum().backward()
    twice = {n: p.grad.clone() for n, p in drafter.named_parameters()}
    drafter.zero_grad()
    run(drafter, *row).float().sum().backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(twice[name], 2 * parameter.grad)


def test_bf16_is_close_to_fp32():
    drafter = make_drafter()
    features, positions, blocks, starts, ends = make_row()
    exact = run(drafter, features, positions, blocks, starts, ends)
    coarse = run(drafter, features.bfloat16(), positions, blocks.bfloat16(), starts, ends)
    assert (coarse.float() - exact).abs().mean() < 0.02 * exact.abs().mean()


def test_state_dict_has_the_published_names_and_counted_parameters():
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(CONFIG.num_hidden_layers):
        names |= {f"layers.{i}.{n}.weight" for n in ("input_layernorm", "post_attention_layernorm")}
        names |= {f"layers.{i}.self_attn.{n}_proj.weight" for n in "qkvo"}
        names |= {f"layers.{i}.self_attn.{n}_norm.weight" for n in "qk"}
        names |= {f"layers.{i}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    drafter = Drafter(CONFIG)
    assert set(drafter.state_dict()) == names
    assert sum(p.numel() for p in drafter.parameters()) == num_parameters(CONFIG)


def test_initial_weights_depend_on_the_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a, b, c = (Drafter(CONFIG, torch.Generator().manual_seed(s)).state_dict() for s in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["fc.weight"], c["fc.weight"])
    assert abs(a["fc.weight"].std().item() - 0.02) < 0.002
    assert torch.equal(a["norm.weight"], torch.ones(CONFIG.hidden_size))


def test_blocks_are_the_anchor_then_masks():
    rows = torch.arange(12.0).view(6, 2)
    blocks = lay_out_blocks(rows[[5, 0, 3]], 3)
    assert torch.equal(blocks, rows[torch.tensor([[5, 3, 3], [0, 3, 3]])])


@EVERY_CONFIG
def test_z_lab_model_loads_our_weights_strictly_and_gives_our_hidden_states(config):
    zlab = pytest.importorskip("dflash.model")
    drafter = make_drafter(config=config)
    config = zlab.Qwen3Config.from_dict(
        json.loads(json.dumps(drafter_json(config, {}, torch.float32)))
    )
    theirs = zlab.DFlashDraftModel(config).eval()
    theirs.load_state_dict(drafter.state_dict(), strict=True)
    features, positions, blocks, starts, ends = make_row()
    ours = run(drafter, features, positions, blocks, starts, ends)
    for n in range(sum(len(anchors) for anchors in ANCHORS)):
        start, end = int(starts[n]), int(ends[n])
        with torch.no_grad():
            expected = theirs(
                position_ids=torch.arange(end - start + BLOCK)[None],
                noise_embedding=blocks[n : n + 1],
                target_hidden=features[None, start:end],
            )
        torch.testing.assert_close(ours[n], expected[0, 1:], rtol=1e-5, atol=1e-5)
