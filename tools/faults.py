"""Faults that disks, networks, people and forgers put into the files of a cache.

Each takes the cache's folder and a random generator, changes something there, and says what and
where. `fault_campaign.py` puts them into copies of a small cache and looks whether anybody notices.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import crc32c
import numpy as np

from hscache import layout
from hscache.zarr_array import canonical_json, checksum_hex

Fault = Callable[[Path, np.random.Generator], str]

EXTREMES = (
    0,
    -1,
    1,
    2**31,
    2**60,
    2**63,
    10**30,
    None,
    True,
    "",
    "../x",
    "/etc/passwd",
    "a\0b",
    [],
)
"""What a forger writes into metadata."""


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def _choose(folder: Path, rng: np.random.Generator) -> Path:
    """Pick a file: half of the time any, half of the time by its size, as a bad sector would."""
    paths = _files(folder)
    sizes = np.array([path.stat().st_size for path in paths], float)
    weights = sizes / sizes.sum() if rng.random() < 0.5 else None
    return paths[int(rng.choice(len(paths), p=weights))]


def _change(folder: Path, rng: np.random.Generator, change: Callable[[bytearray], str]) -> str:
    path = _choose(folder, rng)
    data = bytearray(path.read_bytes())
    what = change(data)
    path.write_bytes(data)
    return f"{path.relative_to(folder)}: {what}"


def flip_a_bit(folder: Path, rng: np.random.Generator) -> str:
    """Flip one bit."""

    def change(data: bytearray) -> str:
        bit = int(rng.integers(8 * len(data)))
        data[bit // 8] ^= 1 << bit % 8
        return f"bit {bit}"

    return _change(folder, rng, change)


def flip_bits(folder: Path, rng: np.random.Generator) -> str:
    """Flip a few bits of one file."""

    def change(data: bytearray) -> str:
        bits = rng.integers(8 * len(data), size=int(rng.integers(2, 40))).tolist()
        for bit in bits:
            data[bit // 8] ^= 1 << bit % 8
        return f"{len(bits)} bits"

    return _change(folder, rng, change)


def overwrite_a_run(folder: Path, rng: np.random.Generator) -> str:
    """Write a hole of zeros, or a block of noise."""

    def change(data: bytearray) -> str:
        start = int(rng.integers(len(data)))
        size = min(len(data) - start, int(2 ** rng.uniform(0, 13)))
        data[start : start + size] = bytes(size) if rng.random() < 0.5 else rng.bytes(size)
        return f"{size} bytes at {start} overwritten"

    return _change(folder, rng, change)


def swap_blocks(folder: Path, rng: np.random.Generator) -> str:
    """Swap two blocks of one file, as a misdirected write does."""

    def change(data: bytearray) -> str:
        size = int(rng.choice([16, 512, 4096]))
        if len(data) < 2 * size:
            data.reverse()
            return "reversed"
        a, b = (int(x) * size for x in rng.integers(len(data) // size, size=2))
        data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
        return f"blocks of {size} at {a} and {b} swapped"

    return _change(folder, rng, change)


def truncate(folder: Path, rng: np.random.Generator) -> str:
    """Cut a file: by a byte, by half, to nothing, anywhere."""
    path = _choose(folder, rng)
    size = path.stat().st_size
    left = [size - 1, size // 2, 0, int(rng.integers(size))][int(rng.integers(4))]
    os.truncate(path, left)
    return f"{path.relative_to(folder)}: {left} of {size} bytes left"


def append(folder: Path, rng: np.random.Generator) -> str:
    """Append noise."""
    path = _choose(folder, rng)
    more = rng.bytes(int(rng.integers(1, 5000)))
    with path.open("ab") as file:
        file.write(more)
    return f"{path.relative_to(folder)}: {len(more)} bytes appended"


def delete(folder: Path, rng: np.random.Generator) -> str:
    """Delete a file."""
    path = _choose(folder, rng)
    path.unlink()
    return f"{path.relative_to(folder)}: deleted"


def replace_by_another(folder: Path, rng: np.random.Generator) -> str:
    """Put one file under another's name, as after a repair of a filesystem."""
    path, other = _choose(folder, rng), _choose(folder, rng)
    same_name = [p for p in _files(folder) if p.name == path.name and p != path]
    if same_name and rng.random() < 0.8:
        other = same_name[int(rng.integers(len(same_name)))]
    shutil.copyfile(other, path) if other != path else None
    return f"{path.relative_to(folder)}: replaced by {other.relative_to(folder)}"


def swap_folders(folder: Path, rng: np.random.Generator) -> str:
    """Let two shards, or two arrays, trade places."""
    shards = sorted(layout.shards_dir(folder).iterdir())
    a, b = (shards[int(i)] for i in rng.choice(len(shards), 2, replace=False))
    if rng.random() < 0.7:
        names = sorted(p.name for p in a.iterdir() if p.is_dir())
        name = names[int(rng.integers(len(names)))]
        a, b = a / name, b / name
    aside = folder / "aside"
    a.rename(aside)
    b.rename(a)
    aside.rename(b)
    return f"{a.relative_to(folder)} and {b.relative_to(folder)} swapped"


def remove_folder(folder: Path, rng: np.random.Generator) -> str:
    """Delete a folder with all that is in it."""
    folders = sorted(p for p in folder.rglob("*") if p.is_dir())
    path = folders[int(rng.integers(len(folders)))]
    shutil.rmtree(path)
    return f"{path.relative_to(folder)}/: deleted"


def put_something_else(folder: Path, rng: np.random.Generator) -> str:
    """Put a link, a pipe or a folder in the place of a file; a link in the place of a folder."""
    path = _choose(folder, rng)
    what = ["link", "pipe", "folder", "link to a folder"][int(rng.integers(4))]
    if what == "link to a folder":
        path = path.parent if path.parent != folder else layout.plan_dir(folder)
        aside = folder.parent / "outside"
        shutil.rmtree(aside, ignore_errors=True)
        shutil.move(path, aside)
        path.symlink_to(aside)
        return f"{path.relative_to(folder)}/: a link out of the cache"
    if what == "link":
        aside = folder.parent / "outside"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        shutil.move(path, aside / "file")
        path.symlink_to(aside / "file")
    else:
        path.unlink()
        os.mkfifo(path) if what == "pipe" else path.mkdir()
    return f"{path.relative_to(folder)}: a {what}"


# Forgeries: the checksums are right.


def forge_metadata(folder: Path, rng: np.random.Generator) -> str:
    """Change one value of a group's attributes and seal them again."""
    groups = [folder, layout.plan_dir(folder), *sorted(layout.shards_dir(folder).iterdir())]
    path = groups[int(rng.integers(len(groups)))] / "zarr.json"
    content = json.loads(path.read_bytes())["attributes"]["hscache"]
    content.pop("crc32c")
    places = list(_leaves(content))
    parent, key = places[int(rng.integers(len(places)))]
    before = parent[key]
    if rng.random() < 0.2 and isinstance(parent, dict):
        del parent[key]
        after: object = "nothing"
    elif isinstance(before, int) and rng.random() < 0.4:
        after = parent[key] = before + int(rng.integers(-3, 4))
    else:
        after = parent[key] = EXTREMES[int(rng.integers(len(EXTREMES)))]
    seal(path, content)
    return f"{path.relative_to(folder)}: {key} {before!r:.40} is {after!r:.40}, sealed anew"


def _leaves(value: object, out: list | None = None) -> list:
    out = [] if out is None else out
    pairs = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
    for key, item in pairs:
        out.append((value, key))
        if isinstance(item, dict | list):
            _leaves(item, out)
    return out


def seal(path: Path, content: dict) -> None:
    """Write a group's attributes with the checksum that belongs to them."""
    content = {**content, "crc32c": checksum_hex(canonical_json(content))}
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"hscache": content}}
    path.write_bytes(canonical_json(group))


def _array(folder: Path, rng: np.random.Generator) -> tuple[Path, bytearray, np.ndarray]:
    """Pick an array's file; return it with its bytes and its index."""
    paths = [p for p in _files(folder) if p.name.startswith("c.0")]
    path = paths[int(rng.integers(len(paths)))]
    raw = bytearray(path.read_bytes())
    for chunks in range(1, len(raw) // 16 + 1):
        body = raw[-16 * chunks - 4 : -4]
        if crc32c.crc32c(bytes(body)) == int.from_bytes(raw[-4:], "little"):
            return path, raw, np.frombuffer(bytes(body), "<u8").reshape(-1, 2).copy()
    return path, raw, np.zeros((0, 2), "<u8")


def _with_index(before: bytes, index: np.ndarray) -> bytes:
    body = index.astype("<u8").tobytes()
    return before + body + crc32c.crc32c(body).to_bytes(4, "little")


def forge_index(folder: Path, rng: np.random.Generator) -> str:
    """Write offsets and sizes that overlap, are negative, lie outside or wrap around."""
    path, raw, index = _array(folder, rng)
    if not len(index):
        return f"{path.relative_to(folder)}: no index"
    before_index = bytes(raw[: len(raw) - index.nbytes - 4])
    row, column = int(rng.integers(len(index))), int(rng.integers(2))
    values = [0, 1, 2**64 - 1, 2**63, 2**60, 2**32, int(rng.integers(2**62)), int(index[0, 1])]
    value = values[int(rng.integers(len(values)))]
    before = int(index[row, column])
    index[row, column] = np.uint64(value)
    if rng.random() < 0.3:
        rng.shuffle(index)
    path.write_bytes(_with_index(before_index, index))
    return f"{path.relative_to(folder)}: index {row} {before} is {value}, sealed anew"


def forge_frame(folder: Path, rng: np.random.Generator) -> str:
    """Write a chunk of the same size that is another frame: it claims 2^60 bytes, or is a bomb."""
    path, raw, index = _array(folder, rng)
    if not len(index):
        return f"{path.relative_to(folder)}: no index"
    offset, size = (int(x) for x in index[int(rng.integers(len(index)))])
    claims = [2**60, 2**40, 2**31, 2**63, 512 * 300, 0]
    claimed = claims[int(rng.integers(len(claims)))]
    header = struct.pack("<IBQ", 0xFD2FB528, 0b1110_0000, claimed)
    bomb = b"".join(struct.pack("<I", (1 << 20 << 3) | 2)[:3] + b"\0" for _ in range(400))
    body = (header + bomb)[: size - 4].ljust(size - 4, b"\0")
    raw[offset : offset + size] = body + crc32c.crc32c(body).to_bytes(4, "little")
    path.write_bytes(raw)
    return f"{path.relative_to(folder)}: a frame that claims {claimed} bytes"


ACCIDENTS: tuple[Fault, ...] = (
    flip_a_bit, flip_bits, overwrite_a_run, swap_blocks, truncate, append, delete,
    replace_by_another, swap_folders, remove_folder, put_something_else,
)  # fmt: skip
FORGERIES: tuple[Fault, ...] = (forge_metadata, forge_index, forge_frame)
