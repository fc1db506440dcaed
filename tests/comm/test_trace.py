"""The timeline: its events in a step, and its limit."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dgc.comm.lockstep import LockstepWorld
from dgc.comm.meter import PHASES, Trace
from dgc.compression import DGCCompressor
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer


def saved(trace: Any, folder: Any) -> Any:
    path = folder / "deep" / "trace.json"
    trace.save(path)
    return json.loads(path.read_text())


def test_a_step_has_every_phase_of_every_bucket(tmp_path: Path) -> None:
    steps = 3

    def body(transport: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3))
        inner = DGCSGD(model.parameters(), lr=0.1, momentum=0.9)
        compressor = DGCCompressor(0.05, DGCSGDMemory(0.9))
        optimizer = DistributedOptimizer(
            inner, model.named_parameters(), compressor, transport=transport, bucket_mb=1e-3
        )
        optimizer.meter.trace = Trace(transport.rank)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 30)).square().sum().backward()
            optimizer.step()
        return [plan.bucket.name for plan in optimizer.exchange.planned], optimizer.meter

    for rank, (buckets, meter) in enumerate(LockstepWorld(2).run(body)):
        events = saved(meter.trace, tmp_path)["traceEvents"]
        rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        drawn = [(rows[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
        assert {e["pid"] for e in events} == {rank}
        assert len(buckets) > 2
        for bucket in buckets:
            for phase in ("compress", "launch", "wait", "decode"):
                count = sum(row == bucket and name == phase for row, name, _, _ in drawn)
                assert count == steps or (phase == "wait" and count <= steps)
            assert sum(row == f"{bucket} (network)" and name == "in flight" for row, name, _, _ in drawn) == steps
        assert sum(name == "step" for _, name, _, _ in drawn) == steps
        # the phases of one row follow one another, and their sum is what the meter counts
        for row in set(rows.values()):
            own = sorted((start, start + long) for name, _, start, long in drawn if name == row)
            assert all(a[1] <= b[0] + 1e-2 for a, b in zip(own, own[1:], strict=False))
        for phase in PHASES:
            total = sum(long for _, name, _, long in drawn if name == phase)
            assert abs(total * 1e-6 - meter.seconds[phase]) < 1e-4


def test_a_full_trace_counts_what_it_drops(tmp_path: Path) -> None:
    trace = Trace(0, limit=2)
    for i in range(5):
        trace.add("wait", "b", i, i + 1)
    document = saved(trace, tmp_path)
    assert sum(e["ph"] == "X" for e in document["traceEvents"]) == 2 and document["droppedEvents"] == 3
