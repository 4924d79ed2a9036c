"""`hscache produce` on CUDA: running ahead changes no array; run by hand where there is a GPU."""

import pytest
import torch
from producer import array_hashes, command

from hscache import cli, layout, produce
from hscache.manifest import ShardManifest, read_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(folder, target, corpus, codec, **settings):
    settings = {
        "target__device": "cuda",
        "store__shard_tokens": 700,
        "store__threads": 4,
        "store__codec": codec,
        **settings,
    }
    assert cli.main(command(folder, target, corpus, **settings)[3:]) == 0
    hashes = array_hashes(folder)
    return {name: value for name, value in hashes.items() if name.startswith("shards/")}


def manifest(folder, shard):
    return read_group(layout.shard_dir(folder, shard) / "zarr.json", ShardManifest)


@pytest.mark.parametrize("codec", ["lossless", "fp8"])
def test_running_ahead_changes_no_array(codec, tmp_path, qwen3_dir, corpus_file, monkeypatch):
    ahead = make(tmp_path / "ahead", qwen3_dir, corpus_file, codec)
    monkeypatch.setattr(produce, "_runs_ahead", lambda target: False)
    plain = make(tmp_path / "plain", qwen3_dir, corpus_file, codec)
    assert len(plain) >= 4 * 8
    assert ahead == plain
    watched = 0
    for shard in range(4):
        found, expected = (manifest(tmp_path / name, shard) for name in ("ahead", "plain"))
        assert found.provenance["forward"] == "fused"
        watched += (found.provenance["gpu"]["power_w"] or 0) > 0
        assert found.provenance["limit"] in found.provenance["busy"]
        for one, other in zip(found.statistics, expected.statistics, strict=True):
            assert one.mean_norm == pytest.approx(other.mean_norm, rel=1e-4)
            assert one.max_abs == other.max_abs
    assert watched, "no sample of the GPU's power"  # a shard of milliseconds may have none


def test_memory_that_does_not_suffice_halves_the_packs(
    tmp_path, qwen3_dir, corpus_file, monkeypatch, caplog
):
    launch = produce.Stages._launch

    def greedy(self, shard, documents):
        if sum(int(self._plan.lengths[document]) for document in documents) > 150:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")  # a real error of the allocator
        return launch(self, shard, documents)

    monkeypatch.setattr(produce.Stages, "_launch", greedy)
    make(tmp_path / "cache", qwen3_dir, corpus_file, "lossless")
    assert sum("did not fit" in record.getMessage() for record in caplog.records) == 1
    assert manifest(tmp_path / "cache", 3).provenance["token_budget"] <= 150
