"""Write the golden caches of tests/golden: one tiny cache of each codec, and what is in them; and
one of a single document that also has the last block's output.

Run once per schema version, never to make a failing test pass: every later version must open these
bytes. The expected values beside them are worked out here from integers alone, number by number,
without hscache's codecs.

    PYTHONPATH=. python tools/make_golden_cache.py tests/golden
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np

from hscache import files, layout
from hscache.manifest import (
    ContentIdentity,
    EncodingIdentity,
    Identity,
    StatesIdentity,
    encode_group,
)
from hscache.plan import TokenizedDocument, corpus_sha256, deal_into_shards, write_plan
from hscache.planes import ARRAYS, Codec
from hscache.writer import ShardWriter

LAYER_IDS = (1, 4, 7)
HIDDEN = 8
LENGTHS = (5, 300, 17, 1, 42, 9)
HELD_OUT = (2, 5)
SHARD_TOKENS = 320
QUARANTINED = 4  # plan row


def state_bits(row: int, token: int, layer: int, channel: int) -> int:
    """A finite bf16 bit pattern, different at every place; massive in channel 3."""
    mix = (row * 7919 + token * 104729 + layer * 1299709 + channel * 15485863) % 65521
    exponent = 121 + mix % 9 + (10 if channel == 3 else 0)
    return (mix >> 3 & 1) << 15 | exponent << 7 | (mix >> 5 & 127)


def value_of(bits: int) -> float:
    """The number of a normal bf16 bit pattern."""
    sign = -1 if bits >> 15 else 1
    return sign * math.ldexp(128 + (bits & 127), (bits >> 7 & 255) - 127 - 7)


def bits_of(value: float) -> int:
    """The nearest bf16 bit pattern of a normal number, ties to even."""
    if value == 0:
        return 0
    mantissa, exponent = math.frexp(abs(value))  # 0.5 <= mantissa < 1
    steps = round(mantissa * 256)  # Python rounds ties to even
    if steps == 256:
        steps, exponent = 128, exponent + 1
    return (1 << 15 if value < 0 else 0) | (exponent - 1 + 127) << 7 | (steps - 128)


def bitround_4(bits: int) -> int:
    """The nearest bf16 whose mantissa has 4 bits, ties to even."""
    value = value_of(bits)
    exponent = math.frexp(value)[1]
    step = math.ldexp(1, exponent - 5)
    return bits_of(round(value / step) * step)


def fp8_row(row: list[int]) -> list[int]:
    """What a row becomes as float8_e4m3fn with one float32 scale."""
    values = [value_of(bits) for bits in row]
    scale = np.float32(max(map(abs, values)) / 448)
    decoded = []
    for value in values:
        scaled = float(np.float32(value) / scale)
        exponent = max(math.frexp(scaled)[1] - 1, -6)
        step = math.ldexp(1, exponent - 3)
        rounded = max(-448.0, min(448.0, round(scaled / step) * step))
        decoded.append(bits_of(float(np.float32(rounded) * scale)))
    return decoded


def expected_row(row: list[int], codec: Codec) -> list[int]:
    """What the codec gives back for one token and layer."""
    if codec == "bitround4":
        return [bitround_4(bits) for bits in row]
    return fp8_row(row) if codec == "fp8" else row


def make_documents() -> list[TokenizedDocument]:
    """Documents of the lengths above, ids and masks from a formula."""
    return [
        TokenizedDocument(
            ids_T=np.array([(i * 131 + t * 17) % 250 for t in range(length)], np.int32),
            loss_mask_T=np.array([(t + i) % 3 > 0 for t in range(length)], np.uint8),
            source_row=i,
            held_out=i in HELD_OUT,
        )
        for i, length in enumerate(LENGTHS)
    ]


def write_cache(folder: Path, codec: Codec, *, last_hidden: bool = False) -> dict[str, object]:
    """Write one cache; return what a reader must find in it."""
    documents = make_documents()[:1] if last_hidden else make_documents()
    num_stored = len(LAYER_IDS) + last_hidden
    shards = deal_into_shards(documents, SHARD_TOKENS, seed=0)
    ordered = [documents[i] for shard in shards for i in shard]
    identity = Identity(
        states=StatesIdentity(
            target="golden/target",
            revision="0123abc",
            config_sha256="1" * 64,
            weights_sha256="2" * 64,
            tokenizer_sha256="3" * 64,
            template_sha256="4" * 64,
            frozen_sha256="5" * 64,
            target_layer_ids=LAYER_IDS,
            num_target_layers=10,
            last_hidden=last_hidden,
            hidden_size=HIDDEN,
            vocab_size=250,
            dtype="bfloat16",
            trust_remote_code=False,
        ),
        content=ContentIdentity(
            corpus_sha256=corpus_sha256(ordered),
            seed=0,
            max_tokens=512,
            over_long="truncate",
            shard_tokens=SHARD_TOKENS,
            num_documents=len(ordered),
            num_tokens=sum(len(d.ids_T) for d in ordered),
            num_held_out_shards=sum(documents[shard[0]].held_out for shard in shards),
            num_shards=len(shards),
        ),
        encoding=EncodingIdentity(codec=codec),
    )
    folder.mkdir(parents=True)
    write_plan(folder, documents, shards, {"rows in": len(documents)})
    files.create_once(layout.root_file(folder), encode_group(identity))
    found = []
    row = 0
    for number, shard in enumerate(shards):
        with ShardWriter(folder, number, identity) as writer:
            for index in shard:
                length = LENGTHS[index]
                bits = [
                    [
                        [state_bits(row, t, layer, c) for c in range(HIDDEN)]
                        for layer in range(num_stored)
                    ]
                    for t in range(length)
                ]
                if row == QUARANTINED:
                    writer.quarantine(row, "golden quarantine")
                    states = None
                else:
                    writer.add(row, np.array(bits, np.uint16))
                    states = [[expected_row(layer, codec) for layer in token] for token in bits]
                found.append(
                    {
                        "shard": number,
                        "source_row": index,
                        "input_ids": documents[index].ids_T.tolist(),
                        "loss_mask": documents[index].loss_mask_T.tolist(),
                        "bits": states,
                    }
                )
                row += 1
            writer.publish({"note": "golden"})
    return {"identity": dataclasses.asdict(identity), "documents": found}


def main(target: Path) -> None:
    """Write all caches and `expected-CODEC.json` beside them."""
    for codec in ARRAYS:
        expected = write_cache(target / codec, codec)
        text = json.dumps(expected, separators=(",", ":"))
        if codec in ("none", "lossless"):  # the same states: kept once
            (target / "expected-lossless.json").write_text(text + "\n")
        else:
            (target / f"expected-{codec}.json").write_text(text + "\n")
    expected = write_cache(target / "last_hidden", "lossless", last_hidden=True)
    (target / "expected-last_hidden.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
