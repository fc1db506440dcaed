"""Two phases have the bits of an emulation in numpy, which knows the description of the method alone."""

from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from cases import case

from dgc.compression import TwoPhaseCompressor
from dgc.testing import Fleet

pytestmark = pytest.mark.usefixtures("no_type_checks")
SHAPES = ((30, 11), (6, 5, 2), (1,), (0, 4), (700,), (64,))
STEPS, DROPPED = 12, 5
F = np.float32


def transformed(x: Any) -> Any:
    """The Walsh-Hadamard transform of each 64 elements of [blocks, block], times 1/8."""
    x, h = x.reshape(-1, 64).copy(), 1
    while h < 64:
        pairs = x.reshape(len(x), -1, 2, h)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(len(x), 64)
        h *= 2
    return x * F(0.125)


def rounded(x: Any, block: int, bits: int, hadamard: bool) -> Any:
    """Q[x] of whole blocks: the nearest of 2 L + 1 levels, the largest being a bfloat16 above all magnitudes."""
    most = F(2 ** (bits - 1) - 1)
    blocks = (transformed(x) if hadamard else x).reshape(-1, block)
    scale = ((np.abs(blocks).max(1).view(np.int32) + 0xFFFF) & -0x10000).view(F)[:, None]
    with np.errstate(divide="ignore", over="ignore"):
        inverse, sends = most / scale, scale > 0
    sends &= np.isfinite(inverse)
    levels = np.minimum(np.floor(np.abs(blocks) * np.where(sends, inverse, F(0)) + F(0.5)), most)
    values = np.where(blocks < 0, -levels, levels) * np.where(sends, scale / most, F(0))
    return (transformed(values) if hadamard else values).reshape(-1)


class Emulation:
    """All ranks at once. e: Of each rank, in whole blocks. d: Of all servers."""

    def __init__(self, size: int, bits: int, block: int, answer_bits: int, hadamard: bool) -> None:
        self.size, numbers = size, [int(np.prod(shape)) for shape in SHAPES]
        counts = [-(-n // block) for n in numbers]
        each = -(-sum(counts) // size)  # blocks of a chunk
        starts = accumulate(counts, initial=0)
        self.where = np.concatenate([s * block + np.arange(n) for s, n in zip(starts, numbers, strict=False)])
        self.e, self.d = np.zeros((size, size * each * block), F), np.zeros(size * each * block, F)
        self.first = partial(rounded, block=block, bits=bits, hadamard=hadamard)
        self.second = partial(rounded, block=block, bits=answer_bits, hadamard=hadamard)

    def only_elements(self, x: Any) -> Any:
        """x, where what fills the last block of a tensor is zero."""
        kept = np.zeros_like(x)
        kept[..., self.where] = x[..., self.where]
        return kept

    def step(self, gradients: Any, counts: bool = True) -> Any:
        """The mean. counts: Whether the step is not dropped."""
        v = self.e.copy()
        v[:, self.where] += gradients
        if not counts:
            self.e = v
            return None
        sent = np.stack([self.first(own) for own in v])
        self.e = self.only_elements(v - sent)
        z = self.d.copy()
        for own in sent:  # each server adds in the order of ranks
            z += own
        z = self.only_elements(z)
        answer = self.second(z)
        self.d = self.only_elements(z - answer)
        return answer[self.where] / F(self.size)


def flat_table(table: Any) -> Any:
    return torch.cat([part.reshape(-1) for part in table.values()]).numpy()


@pytest.mark.parametrize("size", [1, 3, 5, 7])
@pytest.mark.parametrize(
    ("bits", "block", "answer_bits", "hadamard"),
    [
        (8, 256, 8, False),
        (4, 128, 4, False),
        (4, 64, 8, False),
        (8, 512, 4, True),
        (4, 64, 4, True),
    ],
)
def test_means_and_errors_have_the_bits_of_the_emulation(
    size: int, bits: int, block: int, answer_bits: int, hadamard: bool
) -> None:
    fleet = Fleet(
        partial(TwoPhaseCompressor, bits, block, answer_bits, hadamard=hadamard),
        size,
        [torch.zeros(shape) for shape in SHAPES],
    )
    emulation = Emulation(size, bits, block, answer_bits, hadamard)
    random = np.random.default_rng(size)
    for step in range(STEPS):
        own = [[random.standard_normal(shape).astype(F) ** 3 for shape in SHAPES] for _ in range(size)]
        given: Any = [[torch.tensor(g) for g in gradients] for gradients in own]
        if step == DROPPED:
            own[-1][0][3, 4], given[-1][0][3, 4] = 0, torch.nan
        mean = emulation.step(
            [np.concatenate([g.ravel() for g in gradients]) for gradients in own], step != DROPPED
        )
        means = fleet.step(given)
        with case("step", step):
            tables = [states.state_dict() for states in fleet.states]
            for rank, table in enumerate(tables):
                assert np.array_equal(flat_table(table["errors"]), emulation.e[rank][emulation.where]), rank
                assert mean is None or np.array_equal(means[rank].numpy(), mean), rank
            served = sum(flat_table(table["server_errors"]) for table in tables)
            assert np.array_equal(served, emulation.d[emulation.where])
