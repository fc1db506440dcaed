"""DGC with Adam: AdamW in the warm-up, then DGC of preconditioned gradients. test_onebit_adam.py has the rest."""

from functools import partial
from typing import Any

import pytest
import torch
from cases import case
from optim.nets import run, train, trained, values, wrap

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor, DGCAdamCompressor
from dgc.optim import DGCAdam, DistributedOptimizer, OneBitAdam

pytestmark = pytest.mark.usefixtures("no_type_checks")
WARM_UP, STEPS, SHAPE = 5, 40, (6, 10)
LR, BETAS, EPS, DECAY = 0.05, (0.8, 0.9), 1e-6, 0.1


def gradient(x: Any, rank: int, step: int) -> Any:
    """Of a quadratic, with noise. One element has no gradient until some steps after the warm-up."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    g = x - rank + torch.randn(SHAPE, generator=generator) / 4
    return g.index_fill(0, torch.tensor([0]), 0.0) if step < WARM_UP + 3 else g


def by_hand(size: int, ratio: float, correct: bool) -> Any:
    """The header's formulas, with all ranks in one place."""
    x, m, v = (torch.zeros(SHAPE) for _ in range(3))
    us, errors = ([torch.zeros(SHAPE) for _ in range(size)] for _ in range(2))
    (beta1, beta2), k = BETAS, round(ratio * x.numel())
    for step in range(STEPS):
        t, gs = step + 1, [gradient(x, rank, step) for rank in range(size)]
        c1, c2 = (1 - beta1**t, 1 - beta2 ** min(t, WARM_UP)) if correct else (1.0, 1.0)
        if t <= WARM_UP:
            g = sum(gs) / size
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            if t == WARM_UP:
                v = v.clamp(min=0.01 * v.mean())
                root = (v / (1 - beta2**WARM_UP if correct else 1.0)).sqrt() + EPS
            x = x * (1 - LR * DECAY) - LR / c1 * m / ((v / c2).sqrt() + EPS)
            continue
        mean = torch.zeros(SHAPE)
        for rank, g in enumerate(gs):
            us[rank] = beta1 * us[rank] + g / root
            errors[rank] = errors[rank] + us[rank]
            chosen = errors[rank].view(-1).abs().topk(k).indices
            sent = torch.zeros(x.numel()).index_put((chosen,), errors[rank].view(-1)[chosen]).view(SHAPE)
            errors[rank], mean = errors[rank] - sent, mean + sent / size
        m = beta1 * m
        x = x * (1 - LR * DECAY) - LR / c1 * ((1 - beta1) * mean + m / root)
    return x


def test_every_step_is_that_of_the_formulas() -> None:
    for size, ratio, correct in ((1, 0.1, True), (3, 0.05, True), (3, 0.1, False), (2, 0.999, True)):

        def body(transport: Any, ratio: Any = ratio, correct: Any = correct) -> Any:
            p = torch.nn.Parameter(torch.zeros(SHAPE))
            inner = DGCAdam([p], LR, BETAS, EPS, DECAY, freeze_step=WARM_UP, bias_correction=correct)
            optimizer = DistributedOptimizer(inner, [("p", p)], DGCAdamCompressor(ratio), transport=transport)
            for step in range(STEPS):
                optimizer.zero_grad()
                p.grad = gradient(p.detach(), transport.rank, step)
                optimizer.step()
            return p.detach()

        expected = by_hand(size, ratio, correct)
        with case(size, ratio, correct):
            found = LockstepWorld(size).run(body)
            assert all(torch.equal(x, found[0]) for x in found)
            torch.testing.assert_close(found[0], expected, rtol=0, atol=2e-5)
            assert float(expected.abs().max()) > 0.1 or size == 1


def test_where_everything_is_sent_it_is_adamw_with_a_constant_second_moment() -> None:
    """Up to rounding: momentum is applied before the mean, and divided first."""
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "freeze_step": 6}
    expected = trained(2, range(30), lambda m: OneBitAdam(m.parameters(), **options), DenseCompressor)
    everything = partial(DGCAdamCompressor, 1.0, vectors="sparse")
    found = trained(2, range(30), lambda m: DGCAdam(m.parameters(), **options), everything)
    torch.testing.assert_close(values(found), values(expected), rtol=0, atol=1e-4)


def test_bytes_and_share_of_both_stages() -> None:
    def body(model: Any, transport: Any) -> None:
        compression = DGCAdamCompressor(0.02, int32_indices=True)
        adam = DGCAdam(model.parameters(), lr=0.01, freeze_step=WARM_UP)
        optimizer = wrap(model, transport, lambda m: adam, compression=compression)
        sent = []
        for step in range(WARM_UP + 3):
            before = optimizer.meter.payload_bytes
            train(model, optimizer, [step], transport.rank)
            sent.append(optimizer.meter.payload_bytes - before)
        assert sent[:WARM_UP] == [4 * sum(p.numel() for p in model.parameters())] * WARM_UP
        assert sent[WARM_UP:] == [sent[-1]] * 3 and sent[-1] < sent[0] / 2

    run(2, body)
