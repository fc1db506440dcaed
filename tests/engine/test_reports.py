"""What the host learns of a step at its end, where tensors are on a device: damaged payloads, and who had NaN."""

from typing import Any

import pytest
import torch
from engines import engine_of, step

from dgc import compression
from dgc.comm.lockstep import LockstepTransport, LockstepWorld
from dgc.core.envelope import PayloadError
from dgc.memory import DGCSGDMemory

METHODS: dict[str, Any] = {
    "signs": compression.ScaledSignCompressor,
    "2 bits, scattered": lambda: compression.ThresholdCompressor(wire="scatter"),
    "two phases": compression.TwoPhaseCompressor,
    "PowerSGD": lambda: compression.PowerSGDCompressor(2, min_compression_rate=0),
    "DGC at ratio 1": lambda: compression.DGCCompressor(1.0, DGCSGDMemory(0.9)),
    "bf16": compression.BF16Compressor,
}


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU count as tensors of a device, whose numbers the host does not know."""
    monkeypatch.setattr("dgc.comm.requests.HOST", "none")


class Damaging(LockstepTransport):
    """Changes a byte of what rank 1 has sent, in one round of every bucket."""

    def __init__(self, transport: LockstepTransport, round_number: int):
        super().__init__(transport._world, transport.rank)
        self.suffix = f".{round_number}"

    def wait(self, work: Any) -> Any:
        replies = super().wait(work)
        if work.name.startswith("bucket") and work.name.endswith(self.suffix):
            payload = replies[0][1].clone()
            payload[-1] ^= 1
            return ((replies[0][0], payload), *replies[1:])
        return replies


@pytest.mark.parametrize(
    ("name", "round_number"), [*((name, 0) for name in METHODS), ("two phases", 1), ("2 bits, scattered", 1)]
)
def test_a_damaged_payload_of_any_round_ends_the_step_with_an_error(name: str, round_number: int) -> None:
    def body(transport: LockstepTransport) -> None:
        engine = engine_of(Damaging(transport, round_number), METHODS[name]())
        with pytest.raises(PayloadError, match="rank 1 sent bucket bucket0 with a wrong checksum"):
            step(engine, transport.rank)
        with pytest.raises(RuntimeError, match="an earlier step ended with an exception, PayloadError"):
            engine.check_idle("state_dict()", is_running=False)

    LockstepWorld(2).run(body)


@pytest.mark.parametrize("name", METHODS)
def test_all_ranks_name_the_rank_and_the_parameter_with_nan(name: str) -> None:
    def body(transport: LockstepTransport) -> str | None:
        engine = engine_of(transport, METHODS[name]())
        assert step(engine, transport.rank) is None
        return step(engine, 2 + transport.rank, bad=1 if transport.rank == 1 else None)

    assert LockstepWorld(2).run(body) == ["the gradient of 1.b on rank 1 has NaN or inf, or is 2**64 or more"] * 2


@pytest.mark.parametrize("name", METHODS)
def test_a_dropped_step_leaves_the_state_of_a_step_that_was_checked_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(transport: LockstepTransport) -> Any:
        engine = engine_of(transport, METHODS[name]())
        for number in range(4):
            step(engine, 2 * number + transport.rank, bad=2 if transport.rank == number == 1 else None)
        kept = [plan.states.state_dict() for (plan,) in engine.groups]
        return [plan.bucket.flat.clone() for (plan,) in engine.groups], [{**own, "method": None} for own in kept]

    at_the_end = LockstepWorld(2).run(body)
    monkeypatch.setattr("dgc.comm.requests.HOST", "cpu")
    torch.testing.assert_close(at_the_end, LockstepWorld(2).run(body), rtol=0, atol=0)
