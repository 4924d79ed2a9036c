"""Hashes of what a target is: its config, weights, tokenizer and chat template.

Takes loaded objects or a folder; hands on hex digests for the cache's identity, which change
exactly when hidden states could.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import crc32c

from hscache.zarr_array import canonical_json


def config_sha256(config: dict[str, Any]) -> str:
    """Hash a model config, names of folders and library versions aside."""
    free = {"_name_or_path", "transformers_version", "_commit_hash", "dtype", "torch_dtype"}
    kept = {key: value for key, value in config.items() if key not in free}
    return hashlib.sha256(canonical_json(kept)).hexdigest()


def file_sha256(path: Path) -> str:
    """Hash a file's content; raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_sha256(path: str) -> str:
    """Fingerprint a local folder's weights: names, sizes and crc32c of every safetensors file.

    Reads all bytes once, in threads; a hub model is pinned by its commit instead ("").
    """
    files = sorted(Path(path).glob("*.safetensors"))
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(_file_fingerprint, files))
    return hashlib.sha256(canonical_json(parts)).hexdigest() if parts else ""


def _file_fingerprint(path: Path) -> list[Any]:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            checksum = crc32c.crc32c(block, checksum)
    return [path.name, path.stat().st_size, f"{checksum:08x}"]


def tokenizer_sha256(tokenizer: Any) -> str:
    """Hash a tokenizer's vocabulary, merges and special tokens."""
    backend = tokenizer.backend_tokenizer.to_str()
    return hashlib.sha256(backend.encode()).hexdigest()


def template_sha256(tokenizer: Any) -> str:
    """Hash the chat template."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
