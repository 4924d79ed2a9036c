"""`hscache bench store`: the figures add up; how high they are is no test's business."""

import json

import ml_dtypes
import numpy as np
import pytest
from cache_maker import make_cache

import hscache
from hscache.bench_config import BenchStoreConfig
from hscache.bench_states import random_states, regrouped
from hscache.bench_store import run
from hscache.errors import ConfigError


def config(folder, **changes):
    settings = {
        "folder": folder, "size_gb": 1e-4, "num_layers": 2, "hidden_size": 16, "threads": 2,
        "rounds": 2, "json": folder / "figures" / "bench.json",
    }  # fmt: skip
    return BenchStoreConfig(**{**settings, **changes})


@pytest.mark.parametrize("codec", ["lossless", "none", "bitround4", "fp8"])
def test_figures_add_up_and_nothing_is_left(tmp_path, capsys, codec):
    settings = config(tmp_path, codec=codec)
    assert run(settings) == 0
    assert "tokens/s" in capsys.readouterr().out
    figures = json.loads(settings.json.read_text())
    assert figures["raw_bytes"] == 2048 * 2 * 16 * 2
    assert figures["ratio"] == figures["raw_bytes"] / figures["stored_bytes"]
    for part in figures["parts"].values():
        assert part["gb_per_s"]["min"] <= part["gb_per_s"]["median"] <= part["gb_per_s"]["max"]
        rate = 1e9 * part["gb_per_s"]["median"] / (2 * 16 * 2)
        assert part["tokens_per_s"] == pytest.approx(rate)
    assert ("cold read" in figures["parts"]) == figures["cold_is_possible"]
    assert [path.name for path in tmp_path.iterdir()] == ["figures"]


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    assert run(config(tmp_path), dry_run=True) == 0
    assert "would write 0.0001 GB" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_refused_before_it_is_written(tmp_path):
    with pytest.raises(ConfigError, match="Give a smaller --size-gb"):
        run(config(tmp_path, size_gb=1e5))


def test_random_states_have_the_exponent_entropy_of_real_ones():
    exponent = random_states((512, 1, 1024)) >> 7 & 0xFF
    share = np.bincount(exponent.ravel()) / exponent.size
    share = share[share > 0]
    assert 2.4 < -(share * np.log2(share)).sum() < 3.2  # bits; real models: 2.6 to 3.1


def test_states_of_a_cache_are_regrouped_layer_by_layer(tmp_path):
    _, states = make_cache(tmp_path)
    cache = hscache.open(tmp_path)
    values_NL = np.concatenate([bits.swapaxes(1, 2).reshape(-1, 2) for bits in states])
    found = regrouped(cache, (60, 3, 32))
    for layer in range(3):
        expected = values_NL[: 60 * 32, layer % 2].reshape(60, 32)
        np.testing.assert_array_equal(found[:, layer], expected)
    assert np.isfinite(found.view(ml_dtypes.bfloat16).astype(np.float32)).all()
    with pytest.raises(ConfigError, match="Give a larger cache"):
        regrouped(cache, (10_000, 2, 32))
