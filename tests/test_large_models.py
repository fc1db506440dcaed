"""Bytes of large models, by their shapes: Transformer-big, and the LSTM of the PowerSGD study."""

import pytest
import torch

from benchmarks.compressors import MIB, STEPS_PER_EPOCH, buckets_of, measure, parameters_of
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import Route, Rule
from dgc.engine.buckets import keep_states, plan_buckets
from scripts.methods import build


@pytest.mark.parametrize(
    ("method", "published"), [("dense", 7730), ("powersgd-1", 25), ("powersgd-2", 38), ("powersgd-4", 64)]
)
def test_an_epoch_of_the_lstm_has_the_published_bytes(method: str, published: int) -> None:
    """Vogels et al. 2019, arXiv 1905.13727: MB (2**20 bytes) that a rank contributes per epoch of WikiText-2."""
    compressor = build(method)
    named = [(name, torch.zeros(p.shape, device="cpu")) for name, p in parameters_of("lstm")]
    world = LockstepWorld(1)
    with torch.no_grad():
        planned = plan_buckets(named, Route([Rule(compressor)]).compressor_for, 25.0, "bucket")
        keep_states(planned, 1, 0)
        for plan in planned:
            world.converse(plan.bucket.name, [plan.states.reduce(plan.bucket)])
    assert round(world.meters[0].payload_bytes * STEPS_PER_EPOCH["lstm"] / MIB) == published


def test_the_shapes_are_those_of_the_configs() -> None:
    """Every parameter is in one bucket, whatever the method's routing."""
    named = parameters_of("transformer-big")
    assert sum(p.numel() for _, p in named) == 209_125_376
    assert all(p.is_meta for _, p in named)
    for method in ("dense", "fp16", "dgc", "powersgd-2"):
        buckets = buckets_of(named, method, 0.001)
        assert sorted(name for group in buckets for name, _ in group) == sorted(name for name, _ in named)


def test_bytes_are_those_of_the_meter() -> None:
    named = [("matrix", torch.empty(64, 32, device="meta")), ("vector", torch.empty(10, device="meta"))]
    with torch.no_grad():
        rows = {m: measure(named, m, 0.001, 2, 2, 1) for m in ("dense", "fp16", "powersgd-2")}
    payloads = {method: row["payload_bytes"] for method, row in rows.items()}
    assert payloads == {"dense": 4 * 2058, "fp16": 2 * 2058, "powersgd-2": 4 * (2 * (64 + 32) + 10) + 24}
    assert all(row["wire_bytes"] == row["payload_bytes"] for row in rows.values())  # 2 ranks
    assert all(row["encode_ms"] > 0 and row["decode_ms"] > 0 for row in rows.values())
