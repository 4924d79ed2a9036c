"""Turn bf16 hidden states into the uint arrays a shard stores, and back.

Takes and gives numpy arrays `bits_TLH` (uint16, the raw bits of bfloat16; T tokens, L captured
layers, H hidden). A codec name decides which arrays are stored; `ARRAYS` lists them. No I/O.

Exponents of one layer repeat, mantissas are noise: split into two byte planes the exponent plane
compresses three times better than bf16 bytes do, and the significand plane is best left alone.

All maths is done a few rows at a time: what lies in between stays in the processor's cache.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

Codec = Literal["lossless", "none", "bitround4", "fp8"]
Bits = npt.NDArray[np.uint16]

FP8_MAX = 448.0  # largest finite float8_e4m3fn
_BITROUND_DROPPED = 3  # bf16 has 7 mantissa bits; bitround4 keeps 4
_SIGN_AND_MANTISSA = np.int16(0x807F - 0x10000)
_BLOCK_VALUES = 1 << 16


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


LOSSY: frozenset[Codec] = frozenset({"bitround4", "fp8"})
"""Codecs that do not give every bit back."""


def split(bits: Bits) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Split bf16 bits into exponent (bits 14..7) and significand (sign and 7 mantissa bits).

    All three have one shape, any.
    """
    exponent, significand = np.empty(bits.shape, np.uint8), np.empty(bits.shape, np.uint8)
    for rows in blocks(bits):
        _split_block(bits[rows], exponent[rows], significand[rows])
    return exponent, significand


def merge(exponent: npt.NDArray[np.uint8], significand: npt.NDArray[np.uint8]) -> Bits:
    """Undo `split`, in any shape: `(e << 7) | (s & 0x7f) | ((s & 0x80) << 8)`."""
    bits = np.empty(exponent.shape, np.uint16)
    for rows in blocks(bits):
        _merge_block(exponent[rows], significand[rows], bits[rows])
    return bits


def bitround(bits: Bits) -> Bits:
    """Round finite bf16 bits, of any shape, to 4 mantissa bits, to nearest even; what would become
    infinite is truncated."""
    rounded = np.right_shift(bits, _BITROUND_DROPPED, dtype=np.uint16)
    rounded &= 1
    rounded += bits
    rounded += (1 << (_BITROUND_DROPPED - 1)) - 1
    rounded &= 0xFFFF & ~((1 << _BITROUND_DROPPED) - 1)
    overflow = ((rounded & 0x7F80) == 0x7F80).astype(np.uint16)
    rounded -= overflow << _BITROUND_DROPPED  # the largest finite value of 4 mantissa bits
    return rounded


def blocks(array: np.ndarray) -> Iterator[slice]:
    """Cut axis 0 into slices of a few ten thousand values, at least one row each."""
    rows = max(1, _BLOCK_VALUES // max(1, math.prod(array.shape[1:])))
    return (slice(start, start + rows) for start in range(0, len(array), rows))


def empty_arrays(shape: tuple[int, ...], codec: Codec) -> dict[str, np.ndarray]:
    """Return memory for the stored arrays of states of a shape [..., hidden]."""
    return {
        name: np.empty(shape if stored.per_hidden else shape[:-1], stored.dtype)
        for name, stored in ARRAYS[codec].items()
    }


def encode(bits_TLH: Bits, codec: Codec) -> dict[str, np.ndarray]:
    """Return the stored arrays, by name, of one run of tokens: [T, L, H] each, fp8's scale [T, L].

    `lossless` and `none` keep every bit. `bitround4` and `fp8` are lossy and expect finite values
    (produce quarantines others). Relative error of a normal value: at most 2^-5 with `bitround4`,
    2^-4 with `fp8` if it is at least 2^-14 of its row's largest (smaller ones: an absolute error of
    at most 2^-18 of that largest).
    """
    if codec == "none":
        return {"bits": bits_TLH}
    arrays = empty_arrays(bits_TLH.shape, codec)
    encode_into(bits_TLH, codec, arrays)
    return arrays


def encode_into(bits: Bits, codec: Codec, out: dict[str, np.ndarray]) -> None:
    """As `encode`, into arrays given by the caller; `bits` may have any axes before hidden."""
    for rows in blocks(bits):
        block = bits[rows]
        if codec == "none":
            out["bits"][rows] = block
        elif codec == "fp8":
            _fp8_block(block, out["fp8"][rows], out["scale"][rows])
        else:
            rounded = bitround(block) if codec == "bitround4" else block
            _split_block(rounded, out["exponent"][rows], out["significand"][rows])


def decode(arrays: dict[str, np.ndarray], codec: Codec) -> Bits:
    """Return bf16 bits [..., H] from the arrays `encode` gave (any slice of tokens and layers)."""
    if codec == "none":
        return arrays["bits"]
    bits = np.empty(next(iter(arrays.values())).shape, np.uint16)
    decode_into(arrays, codec, bits)
    return bits


def decode_into(arrays: dict[str, np.ndarray], codec: Codec, out: Bits) -> None:
    """As `decode`, into memory of the caller's: uint16 in the shape of the states."""
    for rows in blocks(out):
        if codec == "none":
            out[rows] = arrays["bits"][rows]
        elif codec == "fp8":
            values = _from_fp8(arrays["fp8"][rows])
            values *= arrays["scale"][rows][..., None]
            out[rows] = values.astype(ml_dtypes.bfloat16).view(np.uint16)
        else:
            _merge_block(arrays["exponent"][rows], arrays["significand"][rows], out[rows])


def to_float32(bits: Bits) -> npt.NDArray[np.float32]:
    """Return the values of bf16 bits, in their shape."""
    return bits.view(ml_dtypes.bfloat16).astype(np.float32)


def _split_block(
    bits: Bits, exponent: npt.NDArray[np.uint8], significand: npt.NDArray[np.uint8]
) -> None:
    wide = bits >> 7
    np.copyto(exponent, wide, casting="unsafe")  # keeps the low 8 bits
    # sign and mantissa in one byte: bits' own low byte with its top bit replaced by bit 15
    np.right_shift(bits, 8, out=wide)
    wide ^= bits
    wide &= 0x80
    wide ^= bits
    np.copyto(significand, wide, casting="unsafe")


def _merge_block(
    exponent: npt.NDArray[np.uint8], significand: npt.NDArray[np.uint8], out: Bits
) -> None:
    # As a signed number the significand carries its sign to bit 15 by itself.
    wide = significand.view(np.int8).astype(np.int16)
    wide &= _SIGN_AND_MANTISSA
    bits = exponent.astype(np.uint16)
    bits <<= 7
    np.bitwise_or(bits, wide.view(np.uint16), out=out)


def _fp8_block(bits: Bits, fp8: npt.NDArray[np.uint8], scale: npt.NDArray[np.float32]) -> None:
    values = to_float32(bits)
    largest = np.abs(values).max(axis=-1)
    scale[...] = np.where(largest > 0, largest / FP8_MAX, 1.0)
    values /= scale[..., None]
    np.clip(values, -FP8_MAX, FP8_MAX, out=values)
    np.copyto(fp8, _to_fp8(values), casting="unsafe")


def _to_fp8(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """Round to float8_e4m3fn (nearest even) and return the code, in the low 8 bits.

    Integer maths on the float's bits, three times as fast as ml_dtypes' conversion. |values| must
    be at most FP8_MAX.
    """
    bits = values.view(np.int32)
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: round the mantissa to 3 bits; the exponent's bias goes from 127 to 7.
    code = magnitude >> 20
    code &= 1
    code += magnitude
    code += 0x7FFFF
    code >>= 20
    code -= 120 << 3
    # Below 2^-6 the code counts steps of 2^-9, and 2^14 is where float32 has such steps. There the
    # count is never below the normal code, and 8 (2^-6) is never above it.
    steps = (magnitude.view(np.float32) + np.float32(2.0**14)).view(np.int32)
    steps &= 0x1FF
    np.minimum(steps, 8, out=steps)
    np.maximum(code, steps, out=code)
    magnitude[...] = bits
    magnitude >>= 24
    magnitude &= 0x80
    code |= magnitude
    return code


def _from_fp8(fp8: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the values of float8_e4m3fn codes; `_to_fp8` never makes the two that are NaN."""
    sign = fp8.astype(np.uint32)
    wide = sign & 0x7F
    wide <<= 20
    sign &= 0x80
    sign <<= 24
    wide |= sign
    values = wide.view(np.float32)
    values *= np.float32(2.0**120)  # the biases differ by 120; exact, for subnormal codes too
    return values
