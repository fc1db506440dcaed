"""SparseLoCo by hand, its bits per element, and what every file of configs/local builds, and when it exchanges."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from core.ranks import normal
from gossip.networks import Trained, mean, off, on
from torch import Tensor, nn

from dgc.comm.requests import AllGather, next_requests
from dgc.compression import SparseCompressor
from dgc.core.bucket import make_bucket
from dgc.gossip import HierarchicalGossip
from dgc.local import OuterSteps
from dgc.memory import ResidualMemory
from dgc.optim import LocalOptimizer
from dgc.sparse.payloads import CastValues, ChunkIndices, PlainIndices, RiceIndices, TwoBitValues
from dgc.sparse.selectors import TopKPerChunk
from dgc_training.config import ConfigError, instantiate, load

CNN = "configs/digits/cnn.py"
FILES = Path(__file__).parents[2].joinpath("configs/local").glob("*.py")
NAMES = sorted(path.stem for path in FILES if path.stem not in ("__init__", "machines"))
pytestmark = pytest.mark.usefixtures("no_type_checks")


def sparseloco(chunk: int = 4096, k: int = 64, beta: float = 0.95, **formats: Any) -> SparseCompressor:
    memory, selector = ResidualMemory(decay=beta), TopKPerChunk(chunk)
    return SparseCompressor(k / chunk, memory, selector, vectors="sparse", **formats)


def test_sparseloco_by_hand() -> None:
    """e = beta e + d; q = top-k of e; e = e - q; z0 = z0 - alpha mean(q)."""
    alpha, beta, chunk, k, size = 0.7, 0.9, 16, 2, 3

    def body(transport: Any) -> Any:
        p, compression = nn.Parameter(normal(48, seed=0)), sparseloco(chunk, k, beta, values=CastValues("fp32"))
        outer = OuterSteps(2, outer=partial(torch.optim.SGD, lr=alpha), compression=compression)
        optimizer, found = LocalOptimizer(torch.optim.SGD([p], 0.1), [("p", p)], outer, transport=transport), []
        for _ in range(5):
            for _ in range(2):
                optimizer.zero_grad()
                ((p - normal(48, seed=1 + transport.rank)) ** 2).sum().backward()
                optimizer.step()
            found.append(p.detach().double())
        return found

    def top_k(e: Tensor) -> Tensor:
        """Without quantization: the k largest of each chunk, zeros elsewhere."""
        parts = e.view(-1, chunk)
        kept = parts.abs().topk(k).indices
        return torch.zeros_like(parts).scatter(1, kept, parts.gather(1, kept)).view(-1)

    found = on(size, body)
    z0, errors = normal(48, seed=0).double(), [torch.zeros(48, dtype=torch.float64) for _ in range(size)]
    for i in range(5):
        sent = []
        for rank in range(size):
            z = z0.clone()
            for _ in range(2):
                z -= 0.1 * 2 * (z - normal(48, seed=1 + rank).double())
            e = beta * errors[rank] + (z0 - z)
            sent.append(top_k(e))
            errors[rank] = e - sent[-1]
        z0 = z0 - alpha * mean(sent)
        assert all(off(models[i], z0) < 1e-5 for models in found)


@pytest.mark.parametrize(
    ("indices", "bits"), [(RiceIndices(), 9.7), (ChunkIndices(), 14.3), (PlainIndices("int32"), 34.1)], ids=repr
)
def test_bits_per_element(indices: Any, bits: float) -> None:
    """Header, table of values and padding included, of a bucket of 64 of 4096 elements. The paper's are 14."""
    named = [(name, torch.zeros(n, dtype=torch.float32)) for name, n in (("a", 1 << 19), ("b", 1 << 20))]
    bucket, compressor = make_bucket("b", named), sparseloco(values=TwoBitValues(), indices=indices)
    bucket.flat.normal_(generator=torch.Generator().manual_seed(0))
    conversation = compressor.reduce(bucket, compressor.init(bucket, 2, 0))
    (request,) = next_requests(conversation)
    assert isinstance(request, AllGather)
    payload, k = request.tensor.numel(), bucket.numel // 64
    with pytest.raises(StopIteration) as ended:
        next_requests(conversation, ((request.tensor, request.tensor),))
    less = 4 * bucket.numel / payload
    print(f"{indices}: {8 * payload / k:.2f} bits per element, {less:.0f} times less than fp32")
    assert ended.value.value.state.sent.count == k and 8 * payload / k <= bits


def tree_of(*stack: str, **settings: Any) -> Any:
    words = [word for key, value in settings.items() for word in (f"--configs.train.local.{key}", str(value))]
    return load([CNN, *stack], words)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("before", [[], ["configs/local/diloco.py"]], ids=["alone", "after diloco"])
def test_a_file_exchanges_after_its_steps(name: str, before: list[str]) -> None:
    tree = tree_of(*before, f"configs/local/{name}.py", average_every=4)

    def body(transport: Any) -> Any:
        own = Trained(transport, instantiate(tree.train.local))
        own.steps(4 + own.algorithm.delay)
        sent = own.optimizer.meter.payload_bytes
        own.optimizer.synchronize_messages()
        with own.optimizer.consensus():
            pass
        return sent, 4 * own.z.numel(), own.optimizer.consensus_distance

    for sent, once, distance in on(2, body):
        # the blocks of 4 bits are longer than these tensors
        assert 0 < sent <= once + 128 < 2 * once and (name == "streaming" or distance == 0.0)


def test_sparseloco_is_the_published_one() -> None:
    algorithm = instantiate(tree_of("configs/local/sparseloco.py").train.local)
    (rule,) = algorithm.compression.rules
    assert algorithm.average_every == 30 and rule.compressor.compress_ratio == 64 / 4096
    assert isinstance(rule.compressor.memory, ResidualMemory) and rule.compressor.memory.decay == 0.95
    assert rule.compressor.selector == TopKPerChunk(4096)
    assert (rule.compressor.format.values, rule.compressor.format.indices) == (TwoBitValues(6.0), RiceIndices())
    optimizer = algorithm.outer([torch.zeros(1)])
    assert optimizer.defaults["lr"] == 1.0 and optimizer.defaults["momentum"] == 0


def test_a_file_of_gossip_is_the_base_of_local_steps() -> None:
    gossiping = instantiate(tree_of("configs/gossip/sgp.py", "configs/local/sign.py").train.local)
    assert type(gossiping.base).__name__ == "SGP"


def test_the_file_of_machines_puts_local_steps_between_machines() -> None:
    tree = load([CNN, "configs/local/sparseloco.py", "configs/local/machines.py"])
    algorithm = instantiate(tree.train.local)
    assert isinstance(algorithm, HierarchicalGossip) and isinstance(algorithm.base, OuterSteps)
    assert algorithm.base.average_every == 30


def test_compression_of_gradients_under_local_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="train.compression._target_"):
        load([CNN, "configs/powersgd/rank2.py", "configs/local/diloco.py"])
