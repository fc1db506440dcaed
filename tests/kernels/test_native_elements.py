"""Whole steps of codes for every element in native kernels: the bits of single operations in plain torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import case
from kernels.comparison import same
from kernels.steps import METHODS, Steps, gradients_of

from dgc import kernels
from dgc.core.envelope import PayloadError
from dgc.kernels.codes.native import FOUND, NativeElementCoder

CPU = torch.device("cpu")


def pair(coder: Any) -> Any:
    """A backend with this coder, and plain torch."""
    native, reference = (kernels._backend(name, CPU) for name in ("native", "reference"))
    return replace(native, coder=coder), reference


@pytest.mark.usefixtures("native", "no_type_checks")
def test_steps_have_the_bits_of_plain_torch() -> None:
    """The second with NaN and inf on the last rank."""
    others = (
        ("scaled signs", torch.float32, True),
        ("QSGD", torch.bfloat16, False),
        ("2 bits", torch.float64, True),
    )
    for name, dtype, flat in (*((name, torch.float32, False) for name in METHODS), *others):
        ours, theirs = (Steps(METHODS[name], each, 2, dtype, flat) for each in pair(NativeElementCoder()))
        for step in (1, 2, 3):
            with case(name, dtype, step):
                (mine, *found), (expected, *right) = (s.step(gradients_of(2, step)) for s in (ours, theirs))
                assert all(map(same, ours.payloads, theirs.payloads))
                assert all(map(same, sum(found, []), sum(right, [])))
                assert [own.nonfinite for own in mine] == [other.nonfinite for other in expected]
                assert (mine[0].nonfinite is not None) == (step == 2)


@pytest.mark.parametrize("name", METHODS)
def test_the_coder_knows_whether_the_mean_of_scales_that_it_finds_is_finite(name: Any) -> None:
    backend, _ = pair(coder := NativeElementCoder())
    steps = Steps(METHODS[name], backend, 1, torch.float16, True)
    (states,), (bucket,) = steps.states, steps.buckets
    compressor: Any = states.compressor
    code = compressor.code(bucket, states[bucket])
    (result,), _, _ = steps.step(gradients_of(1, 1))
    assert result.is_finite == coder.takes(code) == (code.scale in FOUND)


def test_a_mean_that_overflows_is_not_finite() -> None:
    """The residual makes it too large for fp16."""
    backend, _ = pair(NativeElementCoder())
    steps = Steps(METHODS["scaled signs"], backend, 1, torch.float16, True)
    steps.step(gradients_of(1, 1))
    next(iter(steps.states[0].errors())).fill_(1e5)
    (result,), _, _ = steps.step(gradients_of(1, 1))
    assert result.nonfinite is None and not result.is_finite


@pytest.mark.parametrize("place", [7, 9, 17, 24, 48, -1])
def test_a_changed_byte_is_found(place: int) -> None:
    """In header, table, codes and padding."""

    def change(payloads: Any) -> None:
        payloads[1][place] ^= 64

    messages = []
    for each in pair(NativeElementCoder()):
        with pytest.raises(PayloadError, match="rank 1 ") as refused:
            Steps(METHODS["scaled signs"], each, 2, torch.float32, True).step(gradients_of(2, 1), change)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
