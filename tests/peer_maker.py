"""Write caches as other programs do, from their documented layouts, with states of a real model.

States come from transformers' own forward pass, not from hscache's. Imported by test_import.py.
"""

import gzip
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

BLOCKS = (1, 3)
"""Whose outputs are stored; the test targets have 5 blocks."""


@dataclass
class Sample:
    """A document and what the target makes of it."""

    ids: torch.Tensor
    mask: torch.Tensor
    blocks: torch.Tensor
    """outputs of BLOCKS, bfloat16 [T, L, H]"""
    normed: torch.Tensor
    """after the final norm, [T, H]"""


def make_samples(target_dir: Path, count: int = 24, seed: int = 0) -> list[Sample]:
    """Documents of random ids; the first five tokens of each are not supervised."""
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16).eval()
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        ids = torch.from_numpy(rng.integers(3, 259, int(rng.integers(16, 50))))
        with torch.inference_mode():
            states = model(ids[None], output_hidden_states=True).hidden_states
        samples.append(
            Sample(
                ids=ids,
                mask=(torch.arange(len(ids)) >= 5).long(),
                blocks=torch.stack([states[i + 1][0] for i in BLOCKS], 1).clone(),
                normed=states[-1][0].clone(),
            )
        )
    return samples


def write_specforge(folder: Path, samples: list[Sample], *, pad_to: int = 0, gz=False) -> Path:
    """DSpark features: [1, T, L*H], padded on the right with zeros, ten files a folder."""
    for number, sample in enumerate(samples):
        pad = max(0, pad_to - len(sample.ids))
        states = sample.blocks.flatten(1)
        record = {
            "input_ids": torch.nn.functional.pad(sample.ids, (0, pad)),
            "loss_mask": torch.nn.functional.pad(sample.mask, (0, pad)),
            "hidden_states": torch.nn.functional.pad(states, (0, 0, 0, pad), value=0.5)[None],
            "target_last_hidden_states": sample.normed[None],
        }
        start = number // 10 * 10
        path = folder / f"rows_{start}-{start + 10}" / f"data_{number}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        if gz:
            with gzip.open(path.with_name(path.name + ".gz"), "wb", compresslevel=1) as file:
                torch.save(record, file)
        else:
            torch.save(record, path)
    return folder


def write_speculators(folder: Path, samples: list[Sample], *, final: bool = True) -> Path:
    """A dataset folder as `save_to_disk` leaves it, and in it the folder of hs files."""
    source = folder / "hidden_states"
    source.mkdir(parents=True)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    columns = {
        "input_ids": [s.ids.tolist() for s in samples],
        "loss_mask": [s.mask.tolist() for s in samples],
        "seq_len": [len(s.ids) for s in samples],
    }
    table = pa.table(columns)
    path = str(folder / "data-00000-of-00001.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    for number, sample in enumerate(samples):
        # vLLM's launcher appends the last block's output
        slots = [sample.blocks, sample.normed[:, None]] if final else [sample.blocks]
        tensors = {"hidden_states": torch.cat(slots, 1), "token_ids": sample.ids}
        save_file(tensors, source / f"hs_{number}.safetensors")
    return source


def write_deepspec(folder: Path, samples: list[Sample], per_shard: int = 10) -> Path:
    """Raw shards, an index of 56-byte records, and the manifest."""
    folder.mkdir(parents=True)
    records = []
    for number, sample in enumerate(samples):
        shard = number // per_shard
        parts = [
            sample.ids.to(torch.int32).numpy().tobytes(),
            torch.ones(len(sample.ids), dtype=torch.uint8).numpy().tobytes(),
            sample.mask.to(torch.uint8).numpy().tobytes(),
            sample.blocks.view(torch.int16).numpy().tobytes(),
            sample.normed.view(torch.int16).numpy().tobytes(),
        ]
        with (folder / f"shard-{shard:05d}.bin").open("ab") as file:
            offsets = []
            for part in parts:
                offsets.append(file.tell())
                file.write(part)
        records.append(struct.pack("<QIIQQQQQ", number, shard, len(sample.ids), *offsets))
    (folder / "samples.idx").write_bytes(b"".join(records))
    manifest = {
        "version": 2,
        "num_samples": len(samples),
        "target_layer_ids": list(BLOCKS),
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": samples[0].blocks.shape[-1],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
