"""Learning curves of every selector: the digits network on two ranks in one process, with equal seeds.

The ratio has no warm-up, which would hide differences. Two ranks with batches of 16 use the full ratio from the
first step. All runs start from the same weights and use the same images in the same order.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import dgc.kernels as kernels
from benchmarks.recordings import MOMENTUM
from benchmarks.selector_methods import SELECTORS
from dgc.comm.lockstep import LockstepTransport, LockstepWorld
from dgc.compression import DenseCompressor, DGCCompressor
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc_datasets import Digits
from dgc_models import DigitsCNN

RANKS, BATCH, LR = 2, 16, 0.05


@dataclass
class Curve:
    """loss: mean over an epoch's steps, of rank 0. accuracy: of the test images after each epoch, in %."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)


def learn(method: str, ratio: float, epochs: int, fold: int = 0) -> Curve:
    """method: of SELECTORS, or dense."""
    torch.manual_seed(0)
    models = [DigitsCNN() for _ in range(RANKS)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    data: Any = Digits(fold)
    images, labels = data["train"].tensors
    orders = [torch.randperm(len(images), generator=torch.Generator().manual_seed(e)) for e in range(epochs)]

    def body(transport: LockstepTransport) -> Curve:
        model, curve = models[transport.rank], Curve()
        compression: Any = DenseCompressor()
        if method != "dense":
            compression = DGCCompressor(ratio, DGCSGDMemory(MOMENTUM), selector=SELECTORS[method])
        inner = DGCSGD(model.parameters(), LR, MOMENTUM, weight_decay=1e-4)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), compression, transport=transport)
        for order in orders:
            losses = []
            for batch in order.split(RANKS * BATCH):
                own = batch[transport.rank :: RANKS]
                if len(batch) < RANKS * BATCH:
                    continue  # every rank has the same number of images
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images[own]), labels[own])
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            curve.loss.append(sum(losses) / len(losses))
            curve.accuracy.append(accuracy(model, *data["test"].tensors))
        optimizer.close()
        return curve

    return LockstepWorld(RANKS).run(body)[0]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    found = 100 * float((model(images).argmax(1) == labels).float().mean())
    model.train()
    return found


def curves(ratio: float, epochs: int) -> dict[str, Curve]:
    kernels.use("auto")
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // RANKS))
    methods = ("dense", *(name for name in SELECTORS if name != "radix"))  # radix equals exact
    found = {method: learn(method, ratio, epochs) for method in methods}
    torch.set_num_threads(threads)
    return found


def print_curves(found: dict[str, Curve]) -> None:
    epochs = len(found["dense"].loss)
    shown = sorted({round(i * (epochs - 1) / 4) for i in range(5)})
    print(f"\n{'loss, test accuracy %':<22}" + "".join(f"{f'epoch {e + 1}':>17}" for e in shown))
    for name, curve in found.items():
        print(f"{name:<22}" + "".join(f"{curve.loss[e]:10.4f} {curve.accuracy[e]:6.2f}" for e in shown))
