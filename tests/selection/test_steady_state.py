"""What selectors send in a real run: scikit-learn's digits, two ranks, DGC at 1 %."""

from typing import Any

import pytest
import torch

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc.selection import Exact, Histogram, Predicted
from dgc.wire import PackedIndices, RiceIndices
from dgc_datasets import Digits
from dgc_models import DigitsCNN

WARM, STEPS = 20, 30


class Counting(DGCSGDMemory):
    """Keeps (elements planned, elements sent) of every bucket and step but the last."""

    def __init__(self) -> None:
        super().__init__(0.9)
        self.sent: list[tuple[int, int]] = []

    def pass_inputs(self, bucket: Any, state: Any) -> Any:
        if state.sent is not None:
            self.sent.append((state.sent.indices.numel(), int(state.sent.count)))
        return super().pass_inputs(bucket, state)


def counts(steps: Any, **settings: Any) -> Any:
    """Of rank 1, by step: elements sent for each one planned."""
    data: Any = Digits()["train"]

    def body(transport: Any) -> Any:
        torch.manual_seed(0)
        model = DigitsCNN(width=8)
        memory = Counting()
        inner = DGCSGD(model.parameters(), lr=0.02, momentum=0.9)
        compression = DGCCompressor(0.01, memory, **{k: make() for k, make in settings.items()})
        optimizer = DistributedOptimizer(inner, model.named_parameters(), compression, transport=transport)
        generator = torch.Generator().manual_seed(transport.rank)
        for _ in range(steps + 1):
            chosen = torch.randint(len(data), (16,), generator=generator).tolist()
            images = torch.stack([data[i][0] for i in chosen])
            labels = torch.tensor([data[i][1] for i in chosen])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        return memory.sent

    return [done / planned for planned, done in LockstepWorld(2).run(body)[1]]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("selector", [Predicted, Histogram, Exact, lambda: Predicted(per_bucket=True)])
def test_as_many_elements_as_planned(selector: Any) -> None:
    steady = counts(STEPS, selector=selector)[WARM:]
    assert len(steady) >= STEPS - WARM and all(abs(share - 1) <= 0.02 for share in steady)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("indices", [RiceIndices, PackedIndices])
def test_codes_of_any_length_leave_few_behind(indices: Any) -> None:
    """Their plan has room for what is likely: now and then some elements wait for the next step."""
    steady = counts(STEPS, indices=indices)[WARM:]
    assert 0.98 <= sum(steady) / len(steady) <= 1
