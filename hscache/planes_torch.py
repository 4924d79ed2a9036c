"""`hscache.planes` on torch tensors: encode states on the GPU that made them, decode on any other.

Takes bfloat16 states on any device; hands on the stored arrays as tensors there, bit for bit what
`planes.encode` gives, so that less than the states need cross the bus: half for `fp8`.

Axes: T tokens, L captured layers, H hidden.
"""

from collections.abc import Mapping

import torch

from hscache.planes import FP8_MAX, Codec

TORCH_DTYPES = {"uint8": torch.uint8, "uint16": torch.int16, "float32": torch.float32}
"""torch's dtype for a stored array's; bits of 16 are held as int16."""


def encode_states(states: torch.Tensor, codec: Codec) -> dict[str, torch.Tensor]:
    """Return the stored arrays, by name, of bfloat16 states [..., H]; `planes.encode` in torch."""
    if codec == "fp8":
        values = states.float()
        largest = values.abs().amax(dim=-1)
        # By a tensor: CUDA divides by a plain number through its reciprocal, an ulp off.
        shares = largest / torch.full_like(largest, FP8_MAX)
        scale = torch.where(largest > 0, shares, torch.ones_like(largest))
        values = (values / scale[..., None]).clamp_(-FP8_MAX, FP8_MAX)
        return {"fp8": values.to(torch.float8_e4m3fn).view(torch.uint8), "scale": scale}
    bits = states.view(torch.int16)
    if codec == "none":
        return {"bits": bits}
    if codec == "bitround4":
        bits = _bitround(bits)
    return {
        "exponent": ((bits >> 7) & 0xFF).to(torch.uint8),
        "significand": (((bits >> 8) & 0x80) | (bits & 0x7F)).to(torch.uint8),
    }


def decode_states(arrays: Mapping[str, torch.Tensor], codec: Codec) -> torch.Tensor:
    """Return bfloat16 states [..., H] from their stored arrays; `planes.decode` in torch."""
    if codec == "none":
        return arrays["bits"].view(torch.bfloat16)
    if codec == "fp8":
        values = arrays["fp8"].view(torch.float8_e4m3fn).float()
        return (values * arrays["scale"][..., None]).bfloat16()
    significand = arrays["significand"]
    bits = arrays["exponent"].to(torch.int16).bitwise_left_shift_(7)
    bits |= significand & 0x7F
    bits |= (significand & 0x80).to(torch.int16).bitwise_left_shift_(8)
    return bits.view(torch.bfloat16)


def squared_errors(
    states_TLH: torch.Tensor, arrays: Mapping[str, torch.Tensor], codec: Codec
) -> torch.Tensor:
    """Return what a lossy codec changes: squared differences, float32 [T, L, H]."""
    return (decode_states(arrays, codec).float() - states_TLH.float()).square_()


def _bitround(bits: torch.Tensor) -> torch.Tensor:
    """`planes.bitround` on int16 bits."""
    rounded = (bits + (((bits >> 3) & 1) + 3)) & ~7
    overflow = (rounded & 0x7F80) == 0x7F80
    return rounded - (overflow.to(torch.int16) << 3)
