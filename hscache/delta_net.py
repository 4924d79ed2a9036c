"""Gated delta-net layers of Qwen3.5 hybrids: keep the documents of a pack apart.

Takes a loaded model and a pack's boundaries. While `apart` is open, the causal convolution and the
recurrent scan of those layers, the only two places where tokens meet, start anew at each document.
transformers (5.17 to 5.24) finds both as globals of the model's module; they are put back at the
end. A model without such layers is left alone.

Axes: T tokens of a pack, C channels of the convolution, N heads, D head dim.
"""

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hscache.pretrained import is_hybrid, library_versions, unsupported

_CONV = "causal_conv1d_fn"
_SCAN = "torch_chunk_gated_delta_rule"


@dataclass(frozen=True)
class Operations:
    """The two operations of a delta-net layer in which tokens meet, as transformers calls them."""

    conv: Callable[..., torch.Tensor]
    """(x_1CT, weight, bias, activation=...) -> [1, C, T]"""
    scan: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    """(query_1TND, key_1TND, value_1TND, g=g_1TN, beta=beta_1TN, ...) -> [1, T, N, D], state"""


@contextlib.contextmanager
def apart(model: nn.Module, offsets: Sequence[int] | None) -> Iterator[None]:
    """Run the delta-net layers of `model` so that documents do not meet.

    `offsets` are the documents' boundaries, from 0 to T. None: the input is one document, and the
    layers run exactly as transformers wrote them. Not for two threads at once: the operations are
    globals. Raises UnsupportedTargetError for a transformers that calls them by other names.
    """
    layers = linear_layers(model)
    if not layers:
        yield
        return
    module: Any = sys.modules[type(layers[0]).__module__]
    if not (hasattr(module, _CONV) and hasattr(module, _SCAN)):
        raise unsupported(
            model.config,
            f"transformers {library_versions()['transformers']} has no {_CONV} and {_SCAN} in "
            f"{module.__name__} (5.17 to 5.24 have)",
        )
    found = Operations(getattr(module, _CONV), getattr(module, _SCAN))
    own = found
    if layers[0].out_proj.weight.device.type == "cpu":
        # An installed `fla` takes the place of the plain functions, and then no CPU can run them.
        own = Operations(inspect.unwrap(found.conv), inspect.unwrap(found.scan))
    used = own if offsets is None else packed_operations(own, offsets)
    setattr(module, _CONV, used.conv)
    setattr(module, _SCAN, used.scan)
    try:
        yield
    finally:
        setattr(module, _CONV, found.conv)
        setattr(module, _SCAN, found.scan)


def packed_operations(own: Operations, offsets: Sequence[int]) -> Operations:
    """Return operations that give every document of a pack what `own` gives it alone.

    The seam for kernels: this plain loop needs none, and is the reference.
    Variable-length kernels on CUDA (FLA's scan and convolution take `cu_seqlens`) belong here.
    """
    spans = list(itertools.pairwise(offsets))

    def conv(x_1CT: torch.Tensor, *weights: Any, **options: Any) -> torch.Tensor:
        return torch.cat([own.conv(x_1CT[..., a:b], *weights, **options) for a, b in spans], dim=-1)

    def scan(
        query_1TND: torch.Tensor,
        key_1TND: torch.Tensor,
        value_1TND: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        parts = [
            own.scan(
                query_1TND[:, a:b],
                key_1TND[:, a:b],
                value_1TND[:, a:b],
                g=g[:, a:b],
                beta=beta[:, a:b],
                **options,
            )[0]
            for a, b in spans
        ]
        return torch.cat(parts, dim=1), None

    return Operations(conv, scan)


@contextlib.contextmanager
def without_decay(model: nn.Module) -> Iterator[None]:
    """Let the recurrent states forget nothing, so that no leak can fade before a probe sees it.

    The decay of a step is exp(-exp(A_log) softplus(...)); random weights forget within a few
    tokens, and some heads of trained ones do.
    """
    decays = [layer.A_log for layer in linear_layers(model)]
    kept = [decay.detach().clone() for decay in decays]
    with torch.no_grad():
        for decay in decays:
            decay.fill_(-20)
    try:
        yield
    finally:
        with torch.no_grad():
            for decay, values in zip(decays, kept, strict=True):
                decay.copy_(values)


def linear_layers(model: nn.Module) -> list[Any]:
    """Return the delta-net layers of a hybrid, in order; none for any other model."""
    if not is_hybrid(model.config):
        return []
    blocks: Any = model.get_submodule("layers")
    return [block.linear_attn for block in blocks if hasattr(block, "linear_attn")]
