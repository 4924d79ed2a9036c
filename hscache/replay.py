"""Run the target again on packs of a cache and compare: are these the states it gives?

Takes a cache and the settings of its target; draws documents, runs the very packs that hold them
(the shards' provenance says which documents shared one), and each drawn document alone. Hands on
differences in ulp of bf16 per layer, and damage where the states are not those of this target: of
another block, after a norm, of other weights, or under another chat template.

Axes: T tokens, L captured layers, H hidden, C candidates.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hscache.config import TargetConfig, VerifyConfig
from hscache.errors import ConfigError, HscacheError
from hscache.manifest import identity_diff
from hscache.planes import Bits, decode, encode
from hscache.prepare import states_identity
from hscache.produce import run_pack, software
from hscache.reader import Cache
from hscache.report import format_table
from hscache.target import Target
from hscache.verify import Damage

MAX_ERROR = 0.25
"""Median difference over median value: what `import_check` allows for other kernels' rounding."""


@dataclass(kw_only=True)
class Difference:
    """How far stored states are from those of another run, for one captured layer; a sum."""

    num_values: int = 0
    num_equal: int = 0
    sum_ulp: float = 0.0
    max_ulp: int = 0

    def add(self, stored: Bits, found: Bits) -> None:
        """Count the values of one document's layer, bf16 bits [T, H] each."""
        ulps = ulp_distance(stored, found)
        self.num_values += ulps.size
        self.num_equal += int((stored == found).sum())
        self.sum_ulp += float(ulps.sum())
        self.max_ulp = max(self.max_ulp, int(ulps.max()))


@dataclass(kw_only=True)
class Replay:
    """What a replay found."""

    num_documents: int = 0
    packs: list[Difference] = field(default_factory=list)
    """per captured layer: every document of the packs, run as they were"""
    alone: list[Difference] = field(default_factory=list)
    """per captured layer: the drawn documents, each run by itself"""
    num_packs: int = 0
    same_machine: bool = True
    """every pack was made by this kind of device and these versions"""
    damaged: list[Damage] = field(default_factory=list)


def ulp_distance(a: Bits, b: Bits) -> npt.NDArray[np.int32]:
    """Return how many bf16 numbers lie between two of one shape, by element; -0 and 0 are one."""
    return np.abs(_ordinal(a) - _ordinal(b))


def _ordinal(bits: Bits) -> npt.NDArray[np.int32]:
    magnitude = (bits & 0x7FFF).astype(np.int32)
    return np.where(bits & 0x8000, -magnitude, magnitude)


def load_target(cache: Cache, config: VerifyConfig) -> tuple[Target, list[str]]:
    """Load the target and say in which fields of the states' identity it is another one.

    Raises ConfigError or UnsupportedTargetError when it cannot be loaded.
    """
    states = cache.identity.states
    settings = TargetConfig(
        path=config.target or states.target,
        revision=(states.revision or None) if config.target is None else None,
        target_layer_ids=states.target_layer_ids,
        last_hidden=states.last_hidden,
        dtype="float32" if states.dtype == "float32" else "bfloat16",
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        chat_template_kwargs=states.template_kwargs or None,
    )
    target = Target(settings)
    if int(target.config.hidden_size) != states.hidden_size:
        raise ConfigError(
            f"{settings.path} has hidden size {target.config.hidden_size}, and the states of "
            f"{cache.path} {states.hidden_size}: they are another target's. Give --target."
        )
    loaded = states_identity(settings, target, target.frozen.to_bytes())
    free = {"states.revision", "states.trust_remote_code", "states.origin"}
    if not (states.weights_sha256 and loaded.weights_sha256):  # one of them came from a hub
        free.add("states.weights_sha256")
    lines = identity_diff(states, loaded, "states.")
    return target, [line for line in lines if line.strip().split(":")[0] not in free]


def replay(
    cache: Cache,
    target: Target,
    num_documents: int,
    *,
    seed: int = 0,
    besides: Collection[int | None] = (),
) -> Replay:
    """Run packs that hold `num_documents` random documents again, and these documents alone."""
    num_layers = len(target.captured_ids)
    found = Replay(
        packs=[Difference() for _ in range(num_layers)],
        alone=[Difference() for _ in range(num_layers)],
    )
    for shard, documents in _draw(cache, num_documents, seed, besides).items():
        try:
            _replay_shard(cache, target, shard, documents, found)
        except HscacheError as error:
            found.damaged.append(
                Damage(
                    part=f"shard {shard}",
                    shard=shard,
                    problem=str(error),
                    documents=tuple(documents),
                )
            )
        found.num_documents += len(documents)
    return found


def _draw(
    cache: Cache, num_documents: int, seed: int, besides: Collection[int | None]
) -> dict[int, list[int]]:
    """Draw documents that have states, by shard."""
    rows: list[int] = []
    for shard in cache.published_shards():
        if shard in besides:
            continue
        manifest = cache.shard_manifest(shard)
        if manifest.state != "freed":
            quarantined = {q.document for q in manifest.quarantined}
            rows += [r for r in cache.plan.shard_documents(shard) if r not in quarantined]
    if not rows and not besides:
        raise ConfigError(f"{cache.path} has no document with states to run again.")
    chosen = np.random.default_rng(seed).permutation(len(rows))[:num_documents]
    by_shard: dict[int, list[int]] = {}
    for row in sorted(rows[int(i)] for i in chosen):
        by_shard.setdefault(int(cache.plan.shards[row]), []).append(row)
    return by_shard


def _replay_shard(
    cache: Cache, target: Target, shard: int, documents: Sequence[int], found: Replay
) -> None:
    opened = cache.shard(shard)
    for pack in _packs(cache, shard, documents):
        found.num_packs += 1
        found.same_machine &= _is_like_here(opened.manifest.provenance, target)
        again = dict(run_pack(cache.plan, target, pack))
        for document in pack:
            if document in set(opened.doc_rows.tolist()):  # else quarantined
                _compare(cache, document, again[document], found.packs)
    for document in documents:
        ((_, alone_TLH),) = run_pack(cache.plan, target, [document])
        _compare(cache, document, alone_TLH, found.alone)
        if wrong := _explain(cache, target, document, alone_TLH):
            damage = Damage(part=f"shard {shard}", problem=wrong, documents=(document,))
            found.damaged.append(damage)


def _packs(cache: Cache, shard: int, documents: Sequence[int]) -> Iterator[list[int]]:
    """Yield the packs that held the documents, if the shard says how it was packed."""
    sizes = cache.shard_manifest(shard).provenance.get("documents_per_pack")
    if not isinstance(sizes, list):
        return  # imported: another program packed, if anyone did
    rows = cache.plan.shard_documents(shard)
    if sum(sizes) != len(rows):
        raise HscacheError(
            f"shard {shard} of {cache.path} says it was made of packs of {sizes} documents, and "
            f"the plan gives it {len(rows)}. Its provenance was changed by hand."
        )
    # Not cut anew: a GPU whose memory did not suffice cut the rest of its packs again.
    ends = itertools.accumulate(sizes, initial=0)
    packs = [list(rows[begin:end]) for begin, end in itertools.pairwise(ends)]
    yield from (pack for pack in packs if set(pack) & set(documents))


def _is_like_here(provenance: dict[str, Any], target: Target) -> bool:
    here = {k: v for k, v in software().items() if k != "host"}
    return all(provenance.get(k) == v for k, v in here.items()) and (
        str(provenance.get("device", "")).split(":")[0] == target.device.type
    )


def _compare(cache: Cache, document: int, again_TLH: Bits, sums: Sequence[Difference]) -> None:
    codec = cache.identity.encoding.codec
    stored_TLH = _stored(cache, document)
    for layer, difference in enumerate(sums):
        expected_TH = decode(encode(np.ascontiguousarray(again_TLH[:, layer]), codec), codec)
        difference.add(stored_TLH[:, layer], expected_TH)


def _stored(cache: Cache, document: int) -> Bits:
    return cache.shard(int(cache.plan.shards[document])).captured_bits(document)


def _explain(cache: Cache, target: Target, document: int, again_TLH: Bits) -> str | None:
    """Say what a document's states are if they are not those of the stated blocks.

    Blocks of a residual stream are near to one another, so a threshold alone would not tell them
    apart: each stored layer is compared with every block up to the last captured one.
    """
    stored_TLH = _float(_stored(cache, document))
    if len(stored_TLH) < 2 or np.array_equal(stored_TLH, _float(again_TLH)):
        return None
    candidates = _candidates(cache, target, document)
    lines = []
    for index, block in enumerate(target.captured_ids):
        errors = {name: _error(stored_TLH[:, index], values) for name, values in candidates.items()}
        nearest, stated = min(errors, key=lambda name: errors[name]), f"block {block}"
        if errors[nearest] > MAX_ERROR:
            what = "no block of this target gives them: other weights, ids or another program"
        elif errors[nearest] < errors[stated]:
            what = f"they are the output of {nearest} ({errors[nearest]:.1%} off)"
        else:
            continue
        lines.append(f"the states stored as {stated} are {errors[stated]:.1%} off; {what}")
    return f"document {document}: " + "; ".join(lines) if lines else None


def _candidates(cache: Cache, target: Target, document: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return what a layer might hold instead, [T, H]: any block's output, or it after the norm."""
    captured = target.captured_ids
    try:
        target.captured_ids = tuple(range(captured[-1] + 1))
        ((_, bits_TCH),) = run_pack(cache.plan, target, [document])
    finally:
        target.captured_ids = captured
    blocks_TCH = _float(bits_TCH)
    ids_T = torch.from_numpy(cache.plan.input_ids(document).astype(np.int64))
    embedding_VH = target.frozen.embedding_VH.cpu()
    candidates = {f"block {i}": blocks_TCH[:, i] for i in range(blocks_TCH.shape[1])}
    candidates["the embedding"] = embedding_VH[ids_T].float().numpy()
    norm_H = target.frozen.norm_H.float().cpu()
    factor_H = 1 + norm_H if target.frozen.norm_form == "1+w" else norm_H
    for block in captured:
        values_TH = torch.from_numpy(blocks_TCH[:, block])
        normed_TH = torch.nn.functional.rms_norm(
            values_TH, factor_H.shape, factor_H, target.frozen.norm_eps
        )
        candidates[f"block {block} after the final norm"] = normed_TH.numpy()
    return candidates


def _float(bits: Bits) -> npt.NDArray[np.float32]:
    wide = bits.astype(np.uint32) << 16
    return wide.view(np.float32)


def _error(stored_TH: npt.NDArray[np.float32], found_TH: npt.NDArray[np.float32]) -> float:
    """Return the median difference over the median value, as `import_check` measures."""
    return float(np.median(np.abs(stored_TH - found_TH)) / np.median(np.abs(found_TH)))


def describe(target: Target, found: Replay) -> str:
    """Return the table of a replay, and what to think of it."""
    rows: list[list[Any]] = []
    for name, sums in (("in their packs", found.packs), ("alone", found.alone)):
        for block, one in zip(target.captured_ids, sums, strict=True):
            if one.num_values:
                equal = one.num_equal / one.num_values
                share = "all" if equal == 1 else f"{equal:.2%}"
                mean = one.sum_ulp / one.num_values
                rows.append([name, block, share, f"{mean:.3g}", one.max_ulp])
    table = format_table(["run again", "block", "equal", "mean ulp", "largest ulp"], rows)
    packs = [one for one in found.packs if one.num_values]
    count = f"{found.num_documents} documents in {found.num_packs} packs"
    if not found.num_documents:
        verdict = "nothing was run again: no sound shard is left"
    elif not packs:
        verdict = "no pack is recorded (imported states): compared with documents run alone"
    elif all(one.num_equal == one.num_values for one in packs):
        verdict = f"{count}: bit-equal"
    elif found.same_machine:
        verdict = (
            f"{count}: not bit-equal, though device and versions are those that made them: another "
            "number of threads, kernels that are not deterministic, or states that were changed"
        )
    else:
        verdict = f"{count}: made by other devices or versions, so only near"
    return f"{table}\n{verdict}"


def verify_replay(
    cache: Cache, config: VerifyConfig, besides: Collection[int | None]
) -> tuple[str, list[Damage]]:
    """Load the target, replay, and return what to print and what is damaged.

    Shards `besides` are known to be damaged and are left out.
    """
    target, differences = load_target(cache, config)
    found = replay(cache, target, config.replay, seed=config.seed, besides=besides)
    damaged = found.damaged
    if differences:
        problem = "the target loaded is another one than the cache's:\n" + "\n".join(
            line.replace("this run", "the loaded target has") for line in differences
        )
        damaged = [Damage(part="target", problem=problem), *damaged]
    return describe(target, found), damaged
