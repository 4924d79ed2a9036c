"""What an import needs of another program's files: documents first, then their states.

Takes stated layer ids and stored shapes; hands on which stored slot is the output of which decoder
block, and bf16 bits. The readers of single formats (`peer_specforge`, `peer_speculators`,
`peer_deepspec`) are `PeerCache`s. Axes: T tokens, L layers, H hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hscache.errors import ConfigError
from hscache.planes import Bits

Convention = Literal["block", "hidden_states"]

DTYPES = ("bfloat16", "float32", "float16")
"""Dtypes that become bf16: the first as it is, the others rounded to nearest even."""


class DamagedStates(Exception):
    """A document's states are not the bytes that were written; the others may be."""


@dataclass(frozen=True, kw_only=True)
class PeerDocument:
    """One document as another program stored it; its states stay on disk."""

    number: int
    """of its file, row or record"""
    where: str
    """the same in words, for messages"""
    ids_T: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    loss_mask_T: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    num_padding: int = 0
    """stored positions after the last token that are left out"""
    shape: tuple[int, ...] = ()
    """of the stored states"""
    dtype: str = "bfloat16"
    problem: str = ""
    """why it cannot be read; then the rest is empty"""


class PeerCache(Protocol):
    """Another program's cache."""

    title: str
    """what it is, for the identity"""
    final_state: str
    """what this program stores of the last block, and that it is not imported"""
    layer_ids: tuple[int, ...] | None
    """stored layers by the program's own numbers, if it recorded them"""
    may_append_final: bool
    """whether one more slot than layer ids may be stored: the last block's output"""
    num_documents: int

    def read_documents(self) -> Iterator[PeerDocument]:
        """Yield all documents in a fixed order, without reading their states."""
        ...

    def read_states(self, number: int) -> torch.Tensor:
        """Return a document's states in the shape they are stored in, which `to_bits` understands;
        raise `DamagedStates` if a checksum in the file says that they are not whole."""
        ...


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Which of the stored slots are imported, and the block whose output each is."""

    block_ids: tuple[int, ...]
    """0-based, increasing"""
    num_slots: int
    """stored slots the ids speak of; those after `block_ids` hold the final state"""
    may_append_final: bool

    def fit(self, num_slots: int) -> bool:
        """Tell whether a document with so many stored slots is what the ids describe."""
        return num_slots == self.num_slots or (
            self.may_append_final
            and self.num_slots == len(self.block_ids)
            and num_slots == self.num_slots + 1
        )


def resolve_layers(
    ids: tuple[int, ...], convention: Convention, num_layers: int, *, may_append_final: bool
) -> Layers:
    """Turn stated layer ids into blocks; the last block is named but never taken.

    Its output is pre-norm in some programs and post-norm in others, and serving engines cannot
    feed it to a drafter (dflash.md 1.3). Raises ConfigError for ids that name no block.
    """
    blocks = tuple(i - (convention == "hidden_states") for i in ids)
    taken = blocks[:-1] if blocks and blocks[-1] == num_layers - 1 else blocks
    if (
        not taken
        or list(taken) != sorted(set(taken))
        or not 0 <= taken[0] <= taken[-1] < (num_layers - 1)
    ):
        first = 1 if convention == "hidden_states" else 0
        raise ConfigError(
            f"layer ids {list(ids)} by the convention `{convention}` are the outputs of blocks "
            f"{list(blocks)}, which cannot be imported: expected increasing ids from {first} to "
            f"{first + num_layers - 2} (of {num_layers} blocks; the last one's output may "
            "follow and is left out, it is no captured layer). Is it the other convention?"
        )
    return Layers(block_ids=taken, num_slots=len(ids), may_append_final=may_append_final)


def count_slots(shape: tuple[int, ...], num_tokens: int, hidden_size: int) -> int | None:
    """Return how many states a token has in stored states of a shape, or None if it cannot be.

    Known are [T, L, H], [T, L*H] and [1, T, L*H].
    """
    if len(shape) == 3 and shape[0] == num_tokens and shape[2] == hidden_size:
        return shape[1]
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) == 2 and shape[0] == num_tokens and shape[1] and shape[1] % hidden_size == 0:
        return shape[1] // hidden_size
    return None


def to_bits(states: torch.Tensor, num_tokens: int, layers: Layers, hidden_size: int) -> Bits:
    """Return the taken layers of a document's first tokens, bf16 bits [T, L, H].

    `states` has one of the shapes that `count_slots` knows and a dtype of `DTYPES`.
    """
    states_TLH = states.reshape(
        states.shape[1] if states.shape[0] == 1 and states.dim() == 3 else states.shape[0],
        -1,
        hidden_size,
    )
    taken = states_TLH[:num_tokens, : len(layers.block_ids)].to(torch.bfloat16).contiguous()
    return taken.view(torch.int16).numpy().view(np.uint16)


def find_problem(document: PeerDocument, layers: Layers, hidden_size: int, vocab_size: int) -> str:
    """Say why a document that could be read cannot be used, "" if it can."""
    ids_T, mask_T = document.ids_T, document.loss_mask_T
    num_stored = len(ids_T) + document.num_padding
    if len(mask_T) != len(ids_T):
        return f"{len(ids_T)} ids and {len(mask_T)} loss mask values"
    if document.dtype not in DTYPES:
        return f"states of dtype {document.dtype}; {', '.join(DTYPES)} are read"
    slots = count_slots(document.shape, num_stored, hidden_size)
    if slots is None or not layers.fit(slots):
        return (
            f"states of shape {list(document.shape)}; expected {num_stored} tokens x "
            f"{layers.num_slots} layers stated x hidden size {hidden_size} of the target"
        )
    low, high = int(ids_T.min(initial=0)), int(ids_T.max(initial=0))
    if low < 0 or high >= vocab_size:
        return f"ids from {low} to {high}; the target's are 0 to {vocab_size - 1}"
    if not np.isin(mask_T, (0, 1)).all():
        return "loss mask values other than 0 and 1"
    return ""
