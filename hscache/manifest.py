"""The cache's metadata: identity in the root, attributes in every shard, both checksummed.

Takes and gives frozen dataclasses; writes and reads the `zarr.json` of the groups. A group's
attributes hold one key, "hscache", whose "crc32c" covers the canonical JSON of all the rest, and a
file that is not byte for byte what we would write is refused, so no flipped bit goes unnoticed.
"""

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hscache.errors import CacheMismatchError, ShardCorruptError
from hscache.planes import Codec
from hscache.zarr_array import ArrayRecord, canonical_json, checksum_hex
from hscache.zarr_reader import read_small_file

SCHEMA_VERSION = 2
"""2 added the checksums' own checksum to the records of arrays; 1 is still read."""
LAYER_CONVENTION = "output of decoder block i, 0-based, before any norm"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StatesIdentity:
    """What the numbers mean; caches that are trained on together must agree on all of it."""

    target: str
    """name or path the target was loaded from; a moved folder is not another target"""
    revision: str
    """resolved commit of a hub target, "" for a local folder"""
    config_sha256: str
    weights_sha256: str
    tokenizer_sha256: str
    template_sha256: str
    frozen_sha256: str
    """of frozen/weights.safetensors"""
    target_layer_ids: tuple[int, ...]
    layer_convention: str = LAYER_CONVENTION
    num_target_layers: int
    last_hidden: bool = False
    """the last block's output is stored too, before the final norm; left out of the file if not"""
    hidden_size: int
    vocab_size: int
    dtype: str
    """dtype the target ran in, or an import read; states are stored as bfloat16"""
    trust_remote_code: bool
    origin: str = ""
    """ "" for states captured here, else `imported from ...`: another program captured them"""
    template_kwargs: str = ""
    """JSON of the variables that were set in the chat template, which `template_sha256` is of"""


@dataclass(frozen=True, kw_only=True)
class ContentIdentity:
    """Which tokens are in the cache and how they are dealt into shards."""

    corpus_sha256: str
    """of every document's ids and loss mask, in plan order"""
    seed: int
    max_tokens: int
    over_long: str
    shard_tokens: int
    num_documents: int
    num_tokens: int
    num_held_out_shards: int
    """shards 0..n-1 hold the held-out documents and nothing else"""
    num_shards: int


@dataclass(frozen=True, kw_only=True)
class EncodingIdentity:
    """How states are written."""

    schema_version: int = SCHEMA_VERSION
    codec: Codec


@dataclass(frozen=True, kw_only=True)
class WindowIdentity:
    """How a cache is bounded that frees its shards; left out of the file if it keeps them all."""

    shards: int = 0
    """W: training shards the schedule is made for; 0: all are kept"""
    passes: int = 0
    """P: visits of a shard before it is freed"""
    reserve: int = 0
    """more shards that may be on disk: in flight, or consumed since the last checkpoint"""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identity of a cache, in three tiers, and its window; written once."""

    states: StatesIdentity
    content: ContentIdentity
    encoding: EncodingIdentity
    window: WindowIdentity = WindowIdentity()

    @property
    def sha_input(self) -> bytes:
        """Canonical bytes of the identity, for seeds and comparisons."""
        return canonical_json(_plain(self))


_LATER_FIELDS = ("last_hidden", "origin", "template_kwargs")

# A folder may be moved or named differently; its hashes say whether it is the same target.
_FREE_FIELDS = {"states.target"}


def identity_diff(
    found: object, expected: object, prefix: str = "", *, who: str = "the cache"
) -> list[str]:
    """Return one line per field in which two dataclasses of one type differ."""
    lines: list[str] = []
    for field in dataclasses.fields(expected):  # type: ignore[arg-type]
        name = f"{prefix}{field.name}"
        a, b = getattr(found, field.name), getattr(expected, field.name)
        if dataclasses.is_dataclass(b):
            lines += identity_diff(a, b, f"{name}.", who=who)
        elif a != b and name not in _FREE_FIELDS:
            lines.append(f"  {name}: {who} has {a!r}, this run {b!r}")
    return lines


def require_same_identity(found: Identity, expected: Identity, cache_dir: Path) -> None:
    """Raise CacheMismatchError with a field-by-field diff unless both agree."""
    lines = identity_diff(found, expected)
    if lines:
        raise CacheMismatchError(
            f"{cache_dir} holds another cache than this run would make:\n"
            + "\n".join(lines)
            + "\nRun with the settings of the cache, or write to an empty --shard-dir."
        )


def cache_fingerprint(identity: Identity) -> str:
    """Return the sha256 that ties a shard to its cache."""
    return hashlib.sha256(identity.sha_input).hexdigest()


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """One captured layer's states over a shard, in fp32."""

    layer_id: int
    mean_norm: float
    """mean over tokens of the L2 norm over hidden"""
    max_abs: float
    outlier_channels: tuple[int, ...]
    """the channels of largest root mean square, largest first"""
    outlier_rms: tuple[float, ...]
    median_channel_rms: float
    channel_error: float | None = None
    """relative error of a lossy codec, each channel divided by its root mean square; else None"""


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """A document whose states were refused."""

    document: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """Attributes of one shard."""

    schema_version: int = SCHEMA_VERSION
    shard: int
    state: str
    """published, empty (all documents quarantined) or freed (a tombstone: arrays deleted)"""
    cache: str
    """sha256 of the identity: a shard copied into another cache is refused"""
    codec: Codec
    num_documents: int
    num_tokens: int
    raw_bytes: int
    """bf16 bytes of the states"""
    stored_bytes: int
    """bytes of the arrays that hold them"""
    quarantined: tuple[Quarantined, ...]
    statistics: tuple[LayerStatistics, ...]
    """of the captured layers, and of the last block if its output is stored"""
    arrays: dict[str, ArrayRecord]
    provenance: dict[str, Any]
    """packs, device, versions, tokens/s: recorded, free to differ between shards"""


def encode_group(attributes: object) -> bytes:
    """Return the `zarr.json` bytes of a group with our attributes (a dataclass)."""
    return _sealed(json.loads(canonical_json(_plain(attributes))))


def _plain(attributes: object) -> dict[str, Any]:
    content: dict[str, Any] = dataclasses.asdict(attributes)  # type: ignore[call-overload]
    if isinstance(attributes, Identity):
        # A cache without them is, byte for byte, what was written before there were such fields.
        states = content["states"]
        content["states"] = {k: v for k, v in states.items() if v or k not in _LATER_FIELDS}
        if not attributes.window.shards:
            del content["window"]
    return content


def _sealed(content: dict[str, Any]) -> bytes:
    content = {**content, "crc32c": checksum_hex(canonical_json(content))}
    return canonical_json(
        {"zarr_format": 3, "node_type": "group", "attributes": {"hscache": content}}
    )


def read_group(path: Path, kind: type[T]) -> T:
    """Read and check a group's `zarr.json` and return its attributes as `kind`.

    Raises ShardCorruptError on a damaged file, CacheMismatchError on a newer schema.
    """
    raw = read_small_file(path)
    try:
        content = dict(json.loads(raw)["attributes"]["hscache"])
        content.pop("crc32c")
        schema = content.get("schema_version", content.get("encoding", {}).get("schema_version"))
        newer = isinstance(schema, int) and schema > SCHEMA_VERSION
        sound = raw == _sealed(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path) from error
    if newer:
        raise CacheMismatchError(
            f"{path} has schema version {schema}, and this hscache reads versions up to "
            f"{SCHEMA_VERSION}. Update hscache to read this cache."
        )
    if not sound:
        raise _damaged(path)
    try:
        return from_json(kind, content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path) from error


def from_json(kind: type[T], value: dict[str, Any]) -> T:
    """Build a (nested) dataclass from parsed JSON; unknown or missing fields raise TypeError."""
    hints = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = set(value) - set(hints)
    if unknown:
        raise TypeError(f"unknown fields {sorted(unknown)}")
    return kind(**{name: _convert(hints[name], item) for name, item in value.items()})


_PLAIN = {int, str, float, bool}


def _convert(hint: Any, item: Any) -> Any:
    if hint is Any:
        return item
    if hint in _PLAIN:  # nearly all of it; a cache has thousands of manifests
        return _of_type(hint, item)
    if isinstance(hint, types.UnionType):
        if item is None and type(None) in typing.get_args(hint):
            return None
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
    if dataclasses.is_dataclass(hint):
        return from_json(hint, item)  # type: ignore[arg-type]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        of_elements, elements = arguments[0], _of_type(list, item)
        if of_elements in _PLAIN:
            return tuple(_of_type(of_elements, element) for element in elements)
        return tuple(_convert(of_elements, element) for element in elements)
    if origin is dict:
        return {k: _convert(arguments[1], element) for k, element in _of_type(dict, item).items()}
    if origin is typing.Literal:
        if item not in arguments:
            raise TypeError(f"{item!r} is none of {arguments}")
        return item
    return _of_type(hint, item)


def _of_type(kind: type, item: Any) -> Any:
    """Return a value that has the type; a forged checksum must not let another kind of it in."""
    fits = type(item) is kind or (kind is float and type(item) is int)
    if not fits or (kind is int and item < 0):
        raise TypeError(f"{item!r} is no {kind.__name__} of ours")
    return item


def require_arrays(found: Mapping[str, ArrayRecord], expected: Iterable[str], path: Path) -> None:
    """Raise ShardCorruptError unless a group's attributes describe exactly these arrays."""
    if set(found) != set(expected):
        raise _damaged(path)


def _damaged(path: Path) -> ShardCorruptError:
    return ShardCorruptError(
        f"{path} is damaged or was changed by another program: its content does not match its "
        "checksum. For a shard, run `hscache repair` on the cache and then `hscache produce` "
        "again; for plan/, delete that folder and run `hscache produce` again; for the root, the "
        "cache must be made anew."
    )
