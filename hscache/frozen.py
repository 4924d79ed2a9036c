"""What training needs of the target: embedding, head and final norm, taken from a loaded model.

Takes a transformers model, hands on `Frozen`, whose bytes are the safetensors file in `frozen/`.
"""

import json
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

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
        norm_eps=_norm_eps(norm, model.config),
        norm_form=_norm_form(norm, model.config),
    )


def _norm_eps(norm: Any, config: Any) -> float:
    for name in ("variance_epsilon", "eps"):
        if hasattr(norm, name):
            return float(getattr(norm, name))
    raise unsupported(config, f"its final norm {type(norm).__name__} has no epsilon we know")


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


@torch.inference_mode()
def check_frozen(model: Any, frozen: "Frozen", ids_T: torch.Tensor, **options: Any) -> None:
    """Prove that embedding and head are all there is: no multiplier, no softcap, no bias.

    A drafter reads `embedding[ids]` and its logits are `hidden @ head`. A target that scales either
    would be drafted for in another space. Raises UnsupportedTargetError.
    """
    seen: dict[str, torch.Tensor] = {}

    def keep_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["embedded"] = (args[0] if args else kwargs["hidden_states"])[0]

    def keep_output(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        seen["normed"] = output[0]

    layer, norm = model.base_model.layers[0], model.base_model.norm
    handles = [
        layer.register_forward_pre_hook(keep_input, with_kwargs=True),
        norm.register_forward_hook(keep_output),
    ]
    try:
        positions_1T = torch.arange(len(ids_T))[None]
        output = model(input_ids=ids_T[None], position_ids=positions_1T, use_cache=False, **options)
    except (TypeError, AttributeError) as error:
        raise unsupported(model.config, f"a trial forward failed: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not torch.equal(seen["embedded"], frozen.embedding_VH[ids_T]):
        raise unsupported(model.config, "it changes its embeddings before the first block")
    head_VH = frozen.embedding_VH if frozen.head_VH is None else frozen.head_VH
    expected_TV = (seen["normed"] @ head_VH.T).float()
    difference_TV = output.logits[0].float() - expected_TV
    sound_TV = difference_TV.isfinite()  # a row of NaN in the head is for the content check
    off = difference_TV[sound_TV].norm() / expected_TV[sound_TV].norm()
    if not off < 0.02:
        raise unsupported(model.config, "its logits are not the product of final norm and head")


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
