"""SparseLoCo: by hand, bits per element, and the two formats of its indices."""

from functools import partial
from typing import Any

import pytest
import torch
from gossip.networks import mean, off, on
from torch import Tensor, nn

from dgc.bucket import make_bucket
from dgc.comm.requests import AllGather, next_requests
from dgc.compression import SparseCompressor
from dgc.local import OuterSteps
from dgc.memory import ResidualMemory
from dgc.optim import LocalOptimizer
from dgc.selection import TopKPerChunk
from dgc.wire import CastValues, ChunkIndices, PlainIndices, RiceIndices, TwoBitValues

pytestmark = pytest.mark.usefixtures("no_type_checks")


def normal(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def sparseloco(chunk: int = 4096, k: int = 64, beta: float = 0.95, **formats: Any) -> SparseCompressor:
    memory, selector = ResidualMemory(decay=beta), TopKPerChunk(chunk)
    return SparseCompressor(k / chunk, memory, selector, vectors="sparse", **formats)


def by_hand(e: Tensor, chunk: int, k: int) -> Tensor:
    """q of the paper without quantization: the k largest of each chunk, zeros elsewhere."""
    parts = e.view(-1, chunk)
    kept = parts.abs().topk(k).indices
    return torch.zeros_like(parts).scatter(1, kept, parts.gather(1, kept)).view(-1)


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
