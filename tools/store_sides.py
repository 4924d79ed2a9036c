"""Stores that tools/bench_store.py compares: each writes samples to a folder and reads them back.

A sample is uint16 [tokens, layers, hidden], the bits of bf16 states. `read` delivers one sample,
decoded, in memory of the reader's own; threads read different samples. Optional libraries are
imported when a side is made.
"""

from __future__ import annotations

import gzip
import importlib.machinery
import importlib.util
import io
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hscache import files, layout
from hscache.bench_states import store_identity
from hscache.manifest import encode_group
from hscache.plan import TokenizedDocument, write_plan
from hscache.planes import decode, encode
from hscache.reader import open_cache
from hscache.sums import state_sums
from hscache.writer import ShardWriter

CHUNK = 256


def to_torch(sample: np.ndarray) -> torch.Tensor:
    """The sample as torch holds it."""
    return torch.from_numpy(sample.view(np.int16)).view(torch.bfloat16)


class Ours:
    """hscache: one shard. `merged` reads bf16; else the stored planes, for a GPU to merge."""

    def __init__(self, codec: str, *, merged: bool = False, encoded: bool = False) -> None:
        self.codec, self.merged, self.encoded = codec, merged, encoded

    def write(self, folder: Path, samples: list[np.ndarray], threads: int) -> None:
        """As produce does; `encoded`: of planes that a GPU has split, sums included."""
        tokens, layers, hidden = samples[0].shape
        corpus = [
            TokenizedDocument(
                ids_T=np.zeros(tokens, np.int32),
                loss_mask_T=np.ones(tokens, np.uint8),
                source_row=row,
                held_out=False,
            )
            for row in range(len(samples))
        ]
        write_plan(folder, corpus, [list(range(len(corpus)))], {})
        identity = store_identity(corpus, self.codec, layers, hidden)
        files.create_once(layout.root_file(folder), encode_group(identity))
        pool = ThreadPoolExecutor(threads) if threads > 1 else None
        with ShardWriter(folder, 0, identity, pool) as writer:
            for row, sample in enumerate(samples):
                if self.encoded:
                    writer.add_encoded(row, *self.split[row])
                else:
                    writer.add(row, sample)
            writer.publish({})
        if pool:
            pool.shutdown()

    def prepare(self, samples: list[np.ndarray]) -> None:
        """Split the planes beforehand, for the side that measures the encoder alone."""
        if self.encoded:
            self.split = [(encode(s, self.codec), state_sums(s)) for s in samples]

    def open(self, folder: Path, threads: int) -> None:
        """Open cache and shard."""
        self.shard = open_cache(folder).shard(0)
        self.shard.check_files()

    def buffer(self, sample: np.ndarray) -> Any:
        """Memory that one thread reads into."""
        if self.merged:
            return None
        _, layers, hidden = sample.shape
        layouts = layout.state_layouts(self.codec, layers, hidden, last_hidden=False)
        return {
            name: np.empty((len(sample), *array.row_shape), array.dtype)
            for name, array in layouts.items()
        }

    def read(self, row: int, buffer: Any) -> Any:
        """Decode a document, checksums on."""
        if self.merged:
            return self.shard.bits(row)
        self.shard.read_arrays(row, buffer)
        return buffer


class Side:
    """What a side does where it has nothing of its own to do."""

    def prepare(self, samples: list[np.ndarray]) -> None:
        """Nothing."""

    def buffer(self, sample: np.ndarray) -> Any:
        """No memory of the caller's."""


class Safetensors(Side):
    """One file, a tensor per sample, read through mmap and copied out; no checksums."""

    def write(self, folder: Path, samples: list[np.ndarray], threads: int) -> None:
        """Write all samples at once."""
        tensors = {f"s{i}": to_torch(sample) for i, sample in enumerate(samples)}
        save_file(tensors, folder / "states.safetensors")

    def open(self, folder: Path, threads: int) -> None:
        """Read the header."""
        self.file = safe_open(folder / "states.safetensors", framework="pt")

    def buffer(self, sample: np.ndarray) -> Any:
        """A tensor to copy to: get_tensor alone reads nothing."""
        return torch.empty(sample.shape, dtype=torch.bfloat16)

    def read(self, row: int, buffer: Any) -> Any:
        """Copy a sample out of the mapping."""
        return buffer.copy_(self.file.get_tensor(f"s{row}"))


class TorchSave(Side):
    """One `torch.save` a sample, as SpecForge and others keep their states."""

    def __init__(self, *, compressed: bool = False) -> None:
        self.compressed = compressed

    def _path(self, row: int) -> Path:
        return self.folder / f"data_{row}.ckpt{'.gz' if self.compressed else ''}"

    def write(self, folder: Path, samples: list[np.ndarray], threads: int) -> None:
        """Write a file for each sample."""
        self.folder = folder

        def save(row: int) -> None:
            value = {"hidden_states": to_torch(samples[row])}
            if not self.compressed:
                torch.save(value, self._path(row))
                return
            with gzip.open(self._path(row), "wb", compresslevel=6) as file:
                torch.save(value, file)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(save, range(len(samples))))

    def open(self, folder: Path, threads: int) -> None:
        """List the files."""
        self.folder = folder
        list(folder.iterdir())

    def read(self, row: int, buffer: Any) -> Any:
        """Load a file."""
        if not self.compressed:
            return torch.load(self._path(row), weights_only=True)["hidden_states"]
        with gzip.open(self._path(row), "rb") as file:
            return torch.load(io.BytesIO(file.read()), weights_only=True)["hidden_states"]


class ZarrPython(Side):
    """zarr-python, sharded as ours is: a layer to a chunk of 256 tokens, a sample to a shard."""

    def __init__(self, codec: str) -> None:
        import zarr

        self.zarr, self.codec = zarr, codec

    def write(self, folder: Path, samples: list[np.ndarray], threads: int) -> None:
        """Write one array."""
        zarr = self.zarr
        tokens, layers, hidden = samples[0].shape
        zarr.config.set({"threading.max_workers": threads, "async.concurrency": threads})
        compressor: Any = zarr.codecs.ZstdCodec(level=1)
        if self.codec == "blosc":
            compressor = zarr.codecs.BloscCodec(
                cname="zstd", clevel=1, shuffle="shuffle", typesize=2, blocksize=524288
            )
        array = zarr.create_array(
            folder / "states.zarr",
            shape=(tokens * len(samples), layers, hidden),
            chunks=(CHUNK, 1, hidden),
            shards=(tokens, layers, hidden),
            dtype="uint16",
            compressors=[compressor, zarr.codecs.Crc32cCodec()],
        )
        for row, sample in enumerate(samples):
            array[row * tokens : (row + 1) * tokens] = sample
        self.tokens = tokens

    def open(self, folder: Path, threads: int) -> None:
        """Open the array."""
        self.zarr.config.set({"threading.max_workers": threads, "async.concurrency": threads})
        self.array = self.zarr.open_array(folder / "states.zarr", mode="r")

    def read(self, row: int, buffer: Any) -> Any:
        """Read a shard."""
        return self.array[row * self.tokens : (row + 1) * self.tokens]


class TensorStore(Side):
    """tensorstore's own Zarr v3, sharded the same way, zstd."""

    def __init__(self) -> None:
        import tensorstore

        self.tensorstore = tensorstore

    def _spec(self, folder: Path, threads: int) -> dict[str, Any]:
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{folder}/states.ts/"},
            "context": {
                "data_copy_concurrency": {"limit": threads},
                "file_io_concurrency": {"limit": threads},
            },
        }

    def write(self, folder: Path, samples: list[np.ndarray], threads: int) -> None:
        """Write one array."""
        tokens, layers, hidden = samples[0].shape
        codecs = [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 1}},
            {"name": "crc32c"},
        ]
        sharding = {"chunk_shape": [CHUNK, 1, hidden], "codecs": codecs}
        grid = {"name": "regular", "configuration": {"chunk_shape": [tokens, layers, hidden]}}
        metadata = {
            "shape": [tokens * len(samples), layers, hidden],
            "chunk_grid": grid,
            "data_type": "uint16",
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        }
        spec = {**self._spec(folder, threads), "metadata": metadata, "create": True}
        store = self.tensorstore.open(spec).result()
        for row, sample in enumerate(samples):
            store[row * tokens : (row + 1) * tokens].write(sample).result()
        self.tokens = tokens

    def open(self, folder: Path, threads: int) -> None:
        """Open the array."""
        self.store = self.tensorstore.open(self._spec(folder, threads)).result()

    def read(self, row: int, buffer: Any) -> Any:
        """Read a shard."""
        return self.store[row * self.tokens : (row + 1) * self.tokens].read().result()


class ZipNN(Side):
    """zipnn's bf16 method, a file per sample."""

    def __init__(self) -> None:
        import zipnn

        self.make = lambda threads: zipnn.ZipNN(
            input_format="byte", bytearray_dtype="bfloat16", threads=threads
        )

    def write(self, folder: Path, samples: list[np.ndarray], threads: int) -> None:
        """Compress layer by layer: mixed layers cost it 3 % of its ratio."""
        codec = self.make(threads)
        for row, sample in enumerate(samples):
            ordered = np.ascontiguousarray(sample.swapaxes(0, 1))
            compressed = codec.compress(bytearray(ordered.data.cast("B")))
            (folder / f"{row}.znn").write_bytes(compressed)

    def open(self, folder: Path, threads: int) -> None:
        """List the files."""
        self.folder, self.codec = folder, self.make(threads)
        list(folder.iterdir())

    def read(self, row: int, buffer: Any) -> Any:
        """Decompress a file; layer-major, which costs it no transpose here."""
        return self.codec.decompress((self.folder / f"{row}.znn").read_bytes())


class Mds(Side):
    """MosaicML's MDS, uncompressed: its compression is of whole 64 MB files."""

    def __init__(self) -> None:
        import transformers  # noqa: F401  (before the stand-in: it looks for torchvision itself)

        if importlib.util.find_spec("torchvision") is None:
            _stand_in_for_torchvision()
        import streaming

        self.streaming = streaming

    def write(self, folder: Path, samples: list[np.ndarray], threads: int) -> None:
        """Write shards."""
        shape = ",".join(map(str, samples[0].shape))
        columns = {"states": f"ndarray:uint16:{shape}"}
        with self.streaming.MDSWriter(out=str(folder), columns=columns, size_limit=1 << 28) as out:
            for sample in samples:
                out.write({"states": sample})

    def open(self, folder: Path, threads: int) -> None:
        """Read the index."""
        self.data = self.streaming.LocalDataset(str(folder))

    def read(self, row: int, buffer: Any) -> Any:
        """Read a sample."""
        return self.data[row]["states"]


class Blosc2(Side):
    """blosc2's NDArray on disk: zstd 1 after a byte shuffle."""

    def __init__(self) -> None:
        import blosc2

        self.blosc2 = blosc2

    def write(self, folder: Path, samples: list[np.ndarray], threads: int) -> None:
        """Write one array."""
        blosc2 = self.blosc2
        tokens, layers, hidden = samples[0].shape
        blosc2.set_nthreads(threads)
        array = blosc2.empty(
            shape=(tokens * len(samples), layers, hidden),
            dtype=np.uint16,
            chunks=(CHUNK, 1, hidden),
            urlpath=str(folder / "states.b2nd"),
            cparams={
                "codec": blosc2.Codec.ZSTD,
                "clevel": 1,
                "filters": [blosc2.Filter.SHUFFLE],
                "nthreads": threads,
            },
        )
        for row, sample in enumerate(samples):
            array[row * tokens : (row + 1) * tokens] = sample
        self.tokens = tokens

    def open(self, folder: Path, threads: int) -> None:
        """Open the array."""
        self.blosc2.set_nthreads(threads)
        self.array = self.blosc2.open(str(folder / "states.b2nd"), mode="r")

    def read(self, row: int, buffer: Any) -> Any:
        """Read a slice."""
        return self.array[row * self.tokens : (row + 1) * self.tokens]


SIDES: dict[str, Callable[[], Any]] = {
    "hscache none": lambda: Ours("none"),
    "hscache lossless, planes": lambda: Ours("lossless"),
    "hscache lossless, merged": lambda: Ours("lossless", merged=True),
    "hscache lossless, of planes": lambda: Ours("lossless", encoded=True),
    "hscache bitround4, planes": lambda: Ours("bitround4"),
    "hscache bitround4, merged": lambda: Ours("bitround4", merged=True),
    "hscache fp8, planes": lambda: Ours("fp8"),
    "hscache fp8, merged": lambda: Ours("fp8", merged=True),
    "safetensors": Safetensors,
    "torch.save": TorchSave,
    "torch.save gzip": lambda: TorchSave(compressed=True),
    "zarr-python zstd": lambda: ZarrPython("zstd"),
    "zarr-python blosc": lambda: ZarrPython("blosc"),
    "tensorstore zstd": TensorStore,
    "zipnn": ZipNN,
    "blosc2": Blosc2,
    "MDS": Mds,
}
ONE_READER = {"zarr-python zstd", "zarr-python blosc", "tensorstore zstd", "zipnn", "blosc2"}
"""Sides with threads of their own: one caller reads, so that both have the same number."""
PARALLEL_LIMIT = {"torch.save gzip": 2}
"""Samples written and read, where all of them would take minutes."""


def _stand_in_for_torchvision() -> None:
    """MDS imports torchvision only for image sets; installed, it breaks transformers here."""
    names = ["", ".datasets", ".transforms", ".transforms.functional"]
    for name in names:
        module = types.ModuleType(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(f"torchvision{name}", None)
        sys.modules[f"torchvision{name}"] = module
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    functional: Any = sys.modules["torchvision.transforms.functional"]
    functional.to_tensor = None


def read_all(side: Any, name: str, samples: list[np.ndarray], threads: int) -> None:
    """Read every sample once, with this many threads in all."""
    callers = 1 if name in ONE_READER else threads
    pieces = [range(i, len(samples), callers) for i in range(callers)]

    def read(rows: range) -> None:
        buffer = side.buffer(samples[0])
        for row in rows:
            side.read(row, buffer)

    if callers == 1:
        read(pieces[0])
        return
    with ThreadPoolExecutor(callers) as pool:
        list(pool.map(read, pieces))


def exact(side: Any, samples: list[np.ndarray], rows: tuple[int, ...] = (0, -1)) -> bool:
    """Say whether some samples come back bit for bit, however the side delivers them."""
    for row in rows:
        row %= len(samples)
        found = side.read(row, side.buffer(samples[0]))
        if isinstance(found, dict):
            found = decode(found, side.codec)
        if isinstance(found, torch.Tensor):
            found = found.view(torch.int16).numpy().view(np.uint16)
        expected = samples[row]
        if isinstance(found, bytes | bytearray | memoryview):
            found = np.frombuffer(found, np.uint16)
            expected = np.ascontiguousarray(expected.swapaxes(0, 1))
        if not np.array_equal(np.asarray(found).reshape(expected.shape), expected):
            return False
    return True
