"""SparseLoCo: by hand, bits per element, and the two formats of its indices."""

from functools import partial
from typing import Any

import pytest
import torch
from gossip.networks import mean, off, on
from memory.held import Held
from torch import Tensor, nn

from dgc.bucket import make_bucket
from dgc.comm.requests import AllGather, next_requests
from dgc.compression import SparseCompressor
from dgc.kernels.codec import Codec
from dgc.kernels.selection import SelectionKernels, SparseVector
from dgc.local import OuterSteps
from dgc.memory import ResidualMemory
from dgc.optim import LocalOptimizer
from dgc.selection import TopKPerChunk, plan_selection
from dgc.wire import CastValues, ChunkIndices, PlainIndices, RiceIndices, SparseFormat, TwoBitValues
from dgc.wire.payload import PayloadPlan

pytestmark = pytest.mark.usefixtures("no_type_checks")


def sparseloco(chunk: int = 4096, k: int = 64, beta: float = 0.95, **formats: Any) -> SparseCompressor:
    memory, selector = ResidualMemory(decay=beta), TopKPerChunk(chunk)
    return SparseCompressor(k / chunk, memory, selector, vectors="sparse", **formats)


def normal(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def by_hand(e: Tensor, chunk: int, k: int) -> Tensor:
    """q of the paper without quantization: the k largest of each chunk, zeros elsewhere."""
    q = torch.zeros_like(e)
    for start in range(0, e.numel(), chunk):
        part = e[start : start + chunk]
        kept = part.abs().topk(k).indices
        q[start : start + chunk][kept] = part[kept]
    return q


def test_sparseloco_by_hand() -> None:
    """e = beta e + d; q = top-k of e; e = e - q; z0 = z0 - alpha mean(q)."""
    alpha, beta, chunk, k, size = 0.7, 0.9, 16, 2, 3

    def body(transport: Any) -> Any:
        p, inner = nn.Parameter(normal(48, 0)), partial(torch.optim.SGD, lr=0.1)
        compression = sparseloco(chunk, k, beta, values=CastValues("fp32"))
        outer = OuterSteps(2, outer=partial(torch.optim.SGD, lr=alpha), compression=compression)
        optimizer = LocalOptimizer(inner([p]), [("p", p)], outer, transport=transport)
        found = []
        for _ in range(5):
            for _ in range(2):
                optimizer.zero_grad()
                ((p - normal(48, 1 + transport.rank)) ** 2).sum().backward()
                optimizer.step()
            found.append(p.detach().double())
        return found

    found = on(size, body)
    z0, errors = normal(48, 0).double(), [torch.zeros(48, dtype=torch.float64) for _ in range(size)]
    for i in range(5):
        sent = []
        for rank in range(size):
            z = z0.clone()
            for _ in range(2):
                z -= 0.1 * 2 * (z - normal(48, 1 + rank).double())
            e = beta * errors[rank] + (z0 - z)
            q = by_hand(e, chunk, k)
            errors[rank] = e - q
            sent.append(q)
        z0 = z0 - alpha * mean(sent)
        assert all(off(models[i], z0) < 1e-5 for models in found)


@pytest.mark.parametrize(
    ("indices", "bits"), [(RiceIndices(), 9.7), (ChunkIndices(), 14.3), (PlainIndices("int32"), 34.1)], ids=repr
)
def test_bits_per_element(indices: Any, bits: float) -> None:
    """Header, table of values and padding included, of a bucket of 64 of 4096 elements. The paper's are 14."""
    sizes = {"a": 1 << 19, "b": 1 << 20}
    bucket = make_bucket("b", [(name, torch.zeros(n, dtype=torch.float32)) for name, n in sizes.items()])
    compressor = sparseloco(values=TwoBitValues(), indices=indices)
    bucket.flat.normal_(generator=torch.Generator().manual_seed(0))
    conversation = compressor.reduce(bucket, compressor.init(bucket, 2, 0))
    (request,) = next_requests(conversation)
    assert isinstance(request, AllGather)
    payload, k = request.tensor.numel(), bucket.numel // 64
    with pytest.raises(StopIteration) as ended:
        next_requests(conversation, ((request.tensor, request.tensor),))
    sent = int(ended.value.value.state.sent.count)
    less = 4 * bucket.numel / payload
    print(f"{indices}: {8 * payload / sent:.2f} bits per element, {less:.0f} times less than fp32")
    assert sent == k and 8 * payload / k <= bits


def test_what_was_sent_does_not_decay() -> None:
    """The rest decays by beta in each step, also after a dropped step and a saved state."""
    bucket = make_bucket("b", [("p", torch.zeros(4, dtype=torch.float32))])
    memory = Held(ResidualMemory(decay=0.5))
    memory.plan(bucket)

    def step(values: list[float]) -> Tensor:
        bucket.flat.copy_(torch.tensor(values))
        inputs = memory.pass_inputs(bucket)
        SelectionKernels().accumulate_(inputs)
        return inputs.v

    step([8.0, 4.0, 0.0, 0.0])
    sent = torch.tensor([0], dtype=torch.int32), torch.tensor([8.0]), torch.tensor(1, dtype=torch.int32)
    memory.sent_(bucket, SparseVector(*sent))
    assert memory.state_dict()["residuals"]["p"].tolist() == [0.0, 4.0, 0.0, 0.0]
    assert step([0.0, 0.0, 1.0, 0.0]).tolist() == [0.0, 2.0, 1.0, 0.0]
    memory.sent_(bucket, SparseVector(torch.tensor([1], dtype=torch.int32), torch.tensor([2.0]), sent[2]))
    memory.rollback(bucket)
    assert step([0.0, 0.0, 0.0, 0.0]).tolist() == [0.0, 1.0, 0.5, 0.0]
    with pytest.raises(ValueError, match=r"decay must be in \(0, 1\]"):
        ResidualMemory(decay=0.0)


@pytest.mark.parametrize("count", [0, 1, 5, 640])
def test_indices_within_chunks(count: int) -> None:
    """Chunks without an element, a last chunk that is shorter, and an odd number of elements."""
    numel, capacity = 10 * 4096 + 5, 640
    form = SparseFormat(CastValues(), ChunkIndices())
    plan = plan_selection(make_bucket("b", [("p", torch.zeros(numel))]).segments, capacity / numel)
    order = torch.randperm(numel - 1, generator=torch.Generator().manual_seed(count))[: max(0, count - 1)]
    chosen = torch.cat([order, torch.tensor([numel - 1])[:count]]).sort().values
    padded = torch.zeros(capacity, dtype=torch.int32)
    padded[: chosen.numel()] = chosen
    selection = SparseVector(padded, padded.float(), torch.tensor(chosen.numel(), dtype=torch.int32))
    planned = PayloadPlan(form, plan.per_tensor, numel)
    payload = planned.encode(Codec(), selection, torch.tensor(numel)).payload
    assert payload.numel() == form.nbytes(plan.per_tensor, numel)
    (decoded,), _ = planned.decode(Codec(), [payload]).wait()
    assert torch.equal(decoded.indices, padded)
