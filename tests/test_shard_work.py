"""The limit of a shard is the side that was busy longer, and shares are of the time that passed."""

import time

import pytest
from hybrid_maker import tiny_hybrid

from hscache.forward_flops import forward_flops
from hscache.shard_work import ShardWork


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        ({"forward_s": 8, "copy_s": 1, "write_s": 3, "publish_s": 1}, "forward"),
        ({"forward_s": 3, "copy_s": 4, "write_s": 1, "publish_s": 1}, "measure and copy"),
        ({"forward_s": 5, "copy_s": 1, "write_s": 4, "publish_s": 3}, "check and write"),
        ({"forward_s": 1, "copy_s": 1, "write_s": 2, "publish_s": 6}, "publish"),
    ],
)
def test_the_limit_is_the_busier_side(seconds, limit, caplog):
    caplog.set_level("INFO")
    work = ShardWork(started_s=time.perf_counter() - 10, **seconds)
    report = work.report({}, 100)
    assert report["limit"] == limit
    assert f"the limit: {limit}" in caplog.text
    assert report["busy"]["forward"] == pytest.approx(seconds["forward_s"] / 10, rel=0.1)
    assert report["busy"]["publish"] == pytest.approx(seconds["publish_s"] / 10, rel=0.1)


def test_packs_add_up():
    config = tiny_hybrid().config
    work = ShardWork(started_s=time.perf_counter() - 10)
    work.add_pack(config, (0, 30, 40), 0.5)
    work.add_pack(config, (0, 20), 0.25)
    expected = [(40, (30 * 30 + 10 * 10) / 40), (20, 20)]
    blocks = config.num_hidden_layers
    report = work.report({}, 40)
    assert report["documents_per_pack"] == [2, 1]
    assert report["tokens_per_s"] == pytest.approx(6, rel=0.1)
    assert work.forward_s == 0.75
    assert work.flop == sum(
        forward_flops(config, blocks, num_tokens=tokens, mean_context=(context + 1) / 2).total
        for tokens, context in expected
    )
