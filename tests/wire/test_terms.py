"""Ranks that encode at different ratios or in different formats: an error on every rank that says so."""

from typing import Any

import pytest
import torch
from wire.payloads import FORMATS, SOME, budget_of, encode, scattered, selection_of

from dgc.comm.lockstep import LockstepError, LockstepWorld
from dgc.compression import DGCCompressor
from dgc.kernels.codec import Codec, Terms
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc.wire import PayloadError
from dgc.wire.envelope import Envelope
from dgc.wire.payload import PayloadPlan

CODEC, NUMEL = Codec(), 4000


def sent(form: Any, ratio: Any) -> Any:
    """(payload, budget) of a rank."""
    count = round(ratio * NUMEL)
    budget = budget_of(count, 0, 100, NUMEL)
    first = torch.tensor(NUMEL)
    selection = selection_of(scattered(NUMEL, count))
    return PayloadPlan(form, budget, NUMEL, ratio).encode(CODEC, selection, first).payload, budget


def as_horovod_gathers(payloads: Any) -> Any:
    """It tells the whole alone: each rank cuts it into equal parts."""
    return torch.cat(payloads).chunk(len(payloads))


def told(form: Any, ratio: Any, budget: Any, payloads: Any) -> Any:
    with pytest.raises(PayloadError) as caught:
        PayloadPlan(form, budget, NUMEL, ratio, "bucket b").decode(CODEC, as_horovod_gathers(payloads)).wait()
    return str(caught.value)


def test_a_rank_at_another_ratio_is_named_on_every_rank_whatever_the_sizes() -> None:
    for form in SOME.values():
        for ratios in ([0.1, 0.2], [0.2, 0.1], [0.1, 0.1, 0.2], [0.1, 0.2, 0.1], [0.2, 0.1, 0.1, 0.1]):
            made = [sent(form, ratio) for ratio in ratios]
            for own, (_, budget) in zip(ratios, made, strict=True):
                other = next(rank for rank, ratio in enumerate(ratios) if ratio != own)
                theirs = f"rank {other} encoded bucket b at compress_ratio {ratios[other]}"
                words = told(form, own, budget, [payload for payload, _ in made])
                assert words.startswith(f"{theirs}, this rank at {own}: call begin_epoch")


def test_where_the_sizes_are_the_same_too() -> None:
    """Two ratios that send the same number of elements."""
    form, (payload, budget) = SOME["fp32 int64"], sent(SOME["fp32 int64"], 0.1)
    words = told(form, 0.1001, budget, [payload, payload])
    assert words.startswith("rank 0 encoded bucket b at compress_ratio 0.1, this rank at 0.1001: call")
    PayloadPlan(form, budget, NUMEL, 0.1).decode(CODEC, [payload, payload]).wait()


def test_another_format_is_told_as_such() -> None:
    forms = ["fp16 int32", "bf16 int32", "fp32 int64"]  # the first two are of one size
    for own in forms:
        for other in set(forms) - {own}:
            (mine, budget), (theirs, _) = sent(FORMATS[own], 0.1), sent(FORMATS[other], 0.1)
            words = told(FORMATS[own], 0.1, budget, [mine, theirs])
            assert words.startswith("rank 1 encoded bucket b in another format than this rank"), (own, other)


def test_codes_are_sealed_on_terms_too() -> None:
    bounds, first = torch.tensor([0, 10]), torch.tensor(10)
    one, two = Terms(2 / 32, 7), Terms(1 / 32, 7)

    def sealed(nbytes: Any, terms: Any) -> Any:
        return Envelope("bucket b", bounds, terms).seal(torch.ones(nbytes, dtype=torch.uint8), first)

    for nbytes in (16, 48):
        gathered = as_horovod_gathers([sealed(16, one), sealed(nbytes, two)])
        with pytest.raises(PayloadError, match="rank 1 encoded bucket b at compress_ratio 0.03125"):
            Envelope("bucket b", bounds, one).open(gathered, 16).wait()
    with pytest.raises(PayloadError, match="rank 0 encoded bucket b in another format"):
        Envelope("bucket b", bounds, Terms(2 / 32, 8)).open([sealed(16, one)], 16).wait()


def test_defaults_agree() -> None:
    form, (payload, budget) = SOME["sign rice"], sent(SOME["sign rice"], 0.1)
    plain = encode(form, selection_of(scattered(NUMEL, 400)), budget, NUMEL).payload
    PayloadPlan(form, budget, NUMEL).decode(CODEC, [plain]).wait()
    with pytest.raises(PayloadError, match="this rank at 1: call begin_epoch"):
        PayloadPlan(form, budget, NUMEL).decode(CODEC, [payload]).wait()


def test_a_simulated_rank_at_another_ratio_is_refused_whatever_is_sent() -> None:
    """The lockstep transport refuses payloads of two sizes, or a dense step beside a sparse one."""
    for ratios, words in (
        ((0.25, 0.125), "AllGather"),
        ((1.0, 0.125), "'world' rank 1 sent {0: [^}]*}, rank 0 sent {0: .*, 1: "),
    ):

        def body(transport: Any, ratios: Any = ratios) -> None:
            model = torch.nn.Linear(1000, 1, bias=False)
            dgc = DGCCompressor(ratios[1], DGCSGDMemory(0.9), warmup_epochs=2, warmup_coeff=ratios)
            inner = DGCSGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer = DistributedOptimizer(inner, model.named_parameters(), dgc, transport=transport)
            optimizer.begin_epoch(transport.rank)
            model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()

        with pytest.raises(LockstepError, match=rf"{words}.*; give every rank .* call begin_epoch\(epoch\)"):
            LockstepWorld(2).run(body)
