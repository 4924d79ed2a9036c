"""What training needs of the target: embedding, head and final norm, taken from a loaded model.

Takes a transformers model, hands on `Frozen`, whose bytes are the safetensors file in `frozen/`.
"""

import json
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save

from hscache.pretrained import unsupported
from hscache.zarr_array import canonical_json


def frozen_tensors(model: Any) -> "Frozen":
    """Return the frozen parts of a causal LM; raises UnsupportedTargetError for odd ones."""
    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    norm = getattr(model.base_model, "norm", None)
    if norm is None:
        raise unsupported(model.config, "its final norm is not found at `model.norm`")
    tied = head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding)
    return Frozen(
        embedding_VH=embedding,
        head_VH=None if tied else head,
        norm_H=norm.weight.detach(),
        norm_eps=float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))),
        norm_form=_norm_form(norm, model.config),
    )


def _norm_form(norm: Any, config: Any) -> str:
    """Tell RMSNorm(x) * w from RMSNorm(x) * (1 + w) by running it."""
    x = torch.linspace(-1, 2, norm.weight.numel(), dtype=torch.float32)[None]  # mean not 0
    unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
    weight = norm.weight.detach().float().cpu()
    found = norm(x.to(norm.weight)).detach().float().cpu()
    for form, scale in (("w", weight), ("1+w", 1 + weight)):
        if torch.allclose(found, unit * scale, rtol=0.02, atol=0.02):
            return form
    raise unsupported(config, f"its final norm {type(norm).__name__} is no RMSNorm")


@dataclass(frozen=True)
class Frozen:
    """What training needs of the target: embedding, head [vocab, hidden]; final norm [hidden]."""

    embedding_VH: torch.Tensor
    head_VH: torch.Tensor | None
    """None when tied to the embedding"""
    norm_H: torch.Tensor
    norm_eps: float
    norm_form: str
    """"w" or "1+w": what the normalised vector is multiplied by"""

    def to_bytes(self) -> bytes:
        """Serialise as safetensors; equal weights give equal bytes."""
        tensors = {"embed_tokens.weight": self.embedding_VH, "norm.weight": self.norm_H}
        if self.head_VH is not None:
            tensors["lm_head.weight"] = self.head_VH
        metadata = {
            "norm_eps": repr(self.norm_eps),
            "norm_form": self.norm_form,
            "head": "tied" if self.head_VH is None else "lm_head.weight",
        }
        return _sort_header(
            save({name: t.contiguous().cpu() for name, t in tensors.items()}, metadata=metadata)
        )


def _sort_header(data: bytes) -> bytes:
    """Sort the header of safetensors bytes: the library writes metadata in a random order."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = canonical_json(json.loads(data[8:end]))
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]
