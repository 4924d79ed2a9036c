"""Turn bf16 hidden states into the uint arrays a shard stores, and back.

Takes and gives numpy arrays `bits_TLH` (uint16, the raw bits of bfloat16; T tokens, L captured
layers, H hidden). A codec name decides which arrays are stored; `ARRAYS` lists them. No I/O.

Exponents of one layer repeat, mantissas are noise: split into two byte planes the exponent plane
compresses three times better than bf16 bytes do, and the significand plane is best left alone.
"""

from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

Codec = Literal["lossless", "none", "bitround4", "fp8"]
Bits = npt.NDArray[np.uint16]

FP8_MAX = 448.0  # largest finite float8_e4m3fn
_BITROUND_DROPPED = 3  # bf16 has 7 mantissa bits; bitround4 keeps 4


class StoredArray(NamedTuple):
    """One Zarr array of a shard: its dtype, whether its chunks are zstd frames, and its axes."""

    dtype: str
    compressed: bool
    per_hidden: bool  # [tokens, layers, hidden], else [tokens, layers]


ARRAYS: dict[Codec, dict[str, StoredArray]] = {
    "lossless": {
        "exponent": StoredArray("uint8", True, True),
        "significand": StoredArray("uint8", False, True),
    },
    "none": {"bits": StoredArray("uint16", False, True)},
    "bitround4": {
        "exponent": StoredArray("uint8", True, True),
        "significand": StoredArray("uint8", True, True),
    },
    "fp8": {
        "fp8": StoredArray("uint8", True, True),
        "scale": StoredArray("float32", False, False),
    },
}


def split(bits: Bits) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Split bf16 bits into exponent (bits 14..7) and significand (sign and 7 mantissa bits)."""
    exponent = (bits >> 7).astype(np.uint8)
    significand = ((bits >> 8) & 0x80).astype(np.uint8)
    significand |= (bits & 0x7F).astype(np.uint8)
    return exponent, significand


def merge(exponent: npt.NDArray[np.uint8], significand: npt.NDArray[np.uint8]) -> Bits:
    """Undo `split`: `(e << 7) | (s & 0x7f) | ((s & 0x80) << 8)`."""
    bits = exponent.astype(np.uint16)
    bits <<= 7
    wide = significand.astype(np.uint16)
    bits |= wide & 0x7F
    wide &= 0x80
    wide <<= 8
    bits |= wide
    return bits


def bitround(bits: Bits) -> Bits:
    """Round bf16 to 4 mantissa bits, to nearest even; what would become infinite is truncated."""
    wide = bits.astype(np.uint32)
    half = (1 << (_BITROUND_DROPPED - 1)) - 1
    rounded = wide + half + ((wide >> _BITROUND_DROPPED) & 1)
    keep = np.uint32(0xFFFF & ~((1 << _BITROUND_DROPPED) - 1))
    overflow = (rounded & 0x7F80) == 0x7F80
    rounded = np.where(overflow, wide, rounded) & keep
    return rounded.astype(np.uint16)


def encode(bits_TLH: Bits, codec: Codec) -> dict[str, np.ndarray]:
    """Return the stored arrays, by name, of one run of tokens.

    `lossless` and `none` keep every bit. `bitround4` and `fp8` are lossy and expect finite values
    (produce quarantines others). Relative error of a normal value: at most 2^-5 with `bitround4`,
    2^-4 with `fp8` if it is at least 2^-14 of its row's largest (smaller ones: an absolute error of
    at most 2^-18 of that largest).
    """
    if codec == "none":
        return {"bits": bits_TLH}
    if codec == "fp8":
        values = bits_TLH.view(ml_dtypes.bfloat16).astype(np.float32)
        largest_TL = np.abs(values).max(axis=-1)
        scale_TL = np.where(largest_TL > 0, largest_TL / FP8_MAX, 1.0).astype(np.float32)
        scaled = np.clip(values / scale_TL[..., None], -FP8_MAX, FP8_MAX)
        return {
            "fp8": scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
            "scale": scale_TL,
        }
    if codec == "bitround4":
        bits_TLH = bitround(bits_TLH)
    exponent, significand = split(bits_TLH)
    return {"exponent": exponent, "significand": significand}


def decode(arrays: dict[str, np.ndarray], codec: Codec) -> Bits:
    """Return bf16 bits from the arrays `encode` gave (any slice of tokens and layers)."""
    if codec == "none":
        return arrays["bits"]
    if codec == "fp8":
        values = arrays["fp8"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        values *= arrays["scale"][..., None]
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return merge(arrays["exponent"], arrays["significand"])
