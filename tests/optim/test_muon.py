"""Muon with AdamW: the bits of torch's two optimizers, groups, parts, states, and what is refused."""

import copy
import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from optim import nets
from refusals import check_refusals
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dgc import compression as methods
from dgc import contrib
from dgc.local import Nesterov, OuterSteps
from dgc.optim import LocalOptimizer, MuonWithAdamW, muon_groups
from dgc.optim.muon import newton_schulz

pytestmark = [
    pytest.mark.usefixtures("no_type_checks"),
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9"),
]
HEAD = ["last.*"]


def muon(model: Any, split: Any = None, **options: Any) -> Any:
    return MuonWithAdamW(muon_groups(model, HEAD, split), **{"lr": 0.01, **options})


def test_one_rank_has_the_bits_of_the_two_optimizers() -> None:
    model, other = nets.net(), nets.net()
    vectors = [*other.last.parameters(), other.first.bias, other.spare.bias]
    matrices, adjust = [other.first.weight, other.spare.weight], "match_rms_adamw"
    adamw = torch.optim.AdamW(vectors, 0.01, (0.9, 0.95), weight_decay=0.1, foreach=False)
    two = [torch.optim.Muon(matrices, 0.03, momentum=0.9, adjust_lr_fn=adjust), adamw]
    groups = [{**group, "foreach": False} if not group["muon"] else group for group in muon_groups(model, HEAD)]
    own = MuonWithAdamW(groups, 0.01, muon_lr_ratio=3.0, momentum=0.9, ns_precision="bf16")
    wrapped = nets.wrap(model, nets.alone(), lambda _: own)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in (own, *two)]
    for step in range(4):
        nets.train(model, wrapped, [step], finish=partial(nets.through_gradients, change=nets.clip))
        other.zero_grad()
        nets.loss_of(other, step).backward()
        nets.clip(other)
        for optimizer in two:
            optimizer.step()
        for scheduled in schedules:
            scheduled.step()
        nets.assert_same(model, other, exactly=True)
    assert [group["lr"] for group in wrapped.param_groups] == [0.01 / 5, 0.03 / 5]


def split(first: Any, spare: Any) -> list[Any]:
    return [part.clone() for part in (*first.split([2, 6]), *spare.split(4))]


@pytest.mark.parametrize("copied_after", [None, 1], ids=["whole", "copied"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_parts_are_matrices_of_their_own(precision: str, copied_after: int | None) -> None:
    """A copy of the model with its optimizer goes on."""
    model = nets.net()
    whole = muon(model, {"first*": [2, 6], "spare*": 2}, ns_precision=precision)
    parts = [nn.Parameter(part) for part in split(model.first.weight.detach(), model.spare.weight.detach())]
    own = MuonWithAdamW([{"params": parts, "muon": True}], lr=0.01, ns_precision=precision)
    for step in range(4):
        model.zero_grad()
        nets.loss_of(model, step).backward()
        for part, gradient in zip(parts, split(model.first.weight.grad, model.spare.weight.grad), strict=True):
            part.grad = gradient
        whole.step()
        own.step()
        if step == copied_after:
            model, whole = copy.deepcopy((model, whole))
        torch.testing.assert_close([*parts], split(model.first.weight, model.spare.weight), rtol=0, atol=0)


def moved_by_muon(shape: tuple[int, int], precision: str) -> tuple[Any, Any]:
    """A matrix of zeros after a step without adjusted rates, with its optimizer."""
    p = nn.Parameter(torch.zeros(shape))
    p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    optimizer = MuonWithAdamW(
        [{"params": [p], "muon": True}], 1.0, ns_precision=precision, adjust_lr_fn="original"
    )
    optimizer.step()
    return p, optimizer


wide_or_high = pytest.mark.parametrize("shape", [(8, 24), (24, 8)])


@wide_or_high
def test_iterations_in_fp32_are_near_iterations_in_bf16(shape: Any) -> None:
    one, other = (moved_by_muon(shape, precision)[0].detach().flatten() for precision in ("bf16", "fp32"))
    assert torch.cosine_similarity(one, other, dim=0) > 0.999


@wide_or_high
def test_iterations_make_singular_values_near_one(shape: Any) -> None:
    p, optimizer = moved_by_muon(shape, "fp32")
    values = torch.linalg.svdvals(newton_schulz(p.grad, optimizer.param_groups[0]))
    assert 0.6 < values.min() and values.max() < 1.25


FLAGS = {"bf16": "flags : avx2 avx512f avx512_bf16", "fp32": "flags : avx2 avx512f"}


@pytest.fixture
def processor(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Takes the processor of this machine for one whose faster type is given."""

    def use(precision: str) -> None:
        flags = tmp_path / precision
        flags.write_text(FLAGS[precision])
        monkeypatch.setattr("dgc.optim.muon.CPU_FLAGS", flags)

    return use


def precisions(optimizer: Any) -> list[str]:
    return [group["ns_precision"] for group in optimizer.param_groups if group["muon"]]


@pytest.mark.parametrize("precision", FLAGS)
def test_the_precision_is_that_of_the_processor(processor: Any, precision: str) -> None:
    processor(precision)
    own = muon(nets.net())
    own.add_param_group({"params": [torch.zeros(2, 2)], "muon": True})
    assert precisions(own) == [precision] * 2
    assert own.description().startswith(f'Muon iterates in {precision} (ns_precision="auto"')


def test_without_a_list_of_instructions_the_precision_is_fp32(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setattr("dgc.optim.muon.CPU_FLAGS", tmp_path / "absent")
    assert precisions(muon(nets.net())) == ["fp32"]


@pytest.mark.parametrize("precision", FLAGS)
def test_a_given_precision_is_kept(processor: Any, precision: str) -> None:
    for fast in FLAGS:
        processor(fast)
        own = muon(nets.net(), ns_precision=precision)
        assert precisions(own) == [precision]
        assert own.description() == f"Muon iterates in {precision} (ns_precision)"


def test_a_resumed_run_keeps_the_precision_of_its_state_on_another_processor(processor: Any) -> None:
    processor("bf16")
    model = nets.net()
    own = muon(model)
    nets.train(model, own, range(2), loss=nets.loss_of)
    processor("fp32")
    other_model = copy.deepcopy(model)
    other = muon(other_model)
    assert precisions(other) == ["fp32"]
    other.load_state_dict(copy.deepcopy(own.state_dict()))
    assert precisions(other) == ["bf16"]
    for net, optimizer in ((model, own), (other_model, other)):
        nets.train(net, optimizer, [2], loss=nets.loss_of)
    nets.assert_same(model, other_model, exactly=True)


def test_ranks_whose_processors_have_chosen_other_precisions_are_refused() -> None:
    def body(model: Any, transport: Any) -> None:
        with pytest.raises(
            ValueError, match=r"ns_precision\[0\] is '\w+' on rank 0 and '\w+' on rank 1.*give the setting"
        ):
            nets.wrap(model, transport, partial(muon, ns_precision=("bf16", "fp32")[transport.rank]))

    nets.run(2, body)


@pytest.mark.parametrize("options", [{}, {"split": {"spare*": 2}, "ns_precision": "fp32"}], ids=["whole", "parts"])
def test_a_saved_state_goes_on_with_four_bits(options: dict[str, Any]) -> None:
    def wrapped(model: Any, transport: Any) -> Any:
        return nets.wrap(model, transport, partial(muon, **options), compression=methods.TwoPhaseCompressor(4))

    nets.check_that_a_saved_state_goes_on(wrapped, 3, used=2)


def test_muon_takes_the_mean_of_the_ranks_gradients() -> None:
    nets.assert_same(nets.trained(3, range(3), muon), nets.trained_alone(3, range(3), muon))


POWER, SIGNS = partial(methods.PowerSGDCompressor, 2), methods.ScaledSignCompressor
OF_MOMENTUM = "EF21Compressor has momentum, and MuonWithAdamW applies its own again: set momentum=0.0"
WARNINGS: list[tuple[Any, str, str]] = [
    (POWER, "spare*", "PowerSGDCompressor loses much with Muon, which makes all singular values alike"),
    (SIGNS, "last*", "ScaledSignCompressor ruins Adam's step"),
    (contrib.DoubleSqueezeCompressor, "spare*", "DoubleSqueezeCompressor loses much with Muon"),
    (lambda: methods.EF21Compressor(SIGNS()), "spare*", OF_MOMENTUM),
    *((SIGNS, "spare*", ""), (POWER, "last*", "PowerSGDCompressor loses quality with Adam")),
]


@pytest.mark.parametrize(("make", "name", "words"), WARNINGS)
@pytest.mark.parametrize("outer", [False, True])
def test_warnings_of_compressors(make: Any, name: str, words: str, outer: bool) -> None:
    def body(model: Any, transport: Any) -> None:
        rules = [methods.Rule(make(), name=name, min_dim=2), methods.Rule(methods.DenseCompressor())]
        route = methods.Route(rules)
        if outer:
            method = OuterSteps(2, outer=Nesterov(0.7, 0.8), compression=route)
            optimizer: Any = LocalOptimizer(muon(model), model.named_parameters(), method, transport=transport)
        else:
            optimizer = nets.wrap(model, transport, muon, compression=route)
        nets.train(model, optimizer, range(4), transport.rank)

    if not (outer and "EF21" in words):  # outer steps refuse it
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            nets.run(2, body)
        found = [words in str(warning.message) for warning in caught]
        assert found == [True] * bool(words and (not outer or "singular" in words))


def test_groups() -> None:
    parts: dict[str, Any] = {
        **{"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5), "tied": nn.Linear(4, 5, bias=False)},
        **{"attention": nn.MultiheadAttention(4, 2), "other_width": nn.MultiheadAttention(4, 2, kdim=3, vdim=3)},
        **{"lstm": nn.LSTM(4, 4, proj_size=2), "gru": nn.GRU(4, 4), "convolution": nn.Conv1d(4, 4, 3)},
        **{"column": nn.Linear(1, 4), "fused": nn.Linear(4, 8)},
    }
    parts["tied"].weight = parts["embedding"].weight
    model = nn.ModuleDict(parts)
    names = {p: name for name, p in model.named_parameters()}
    found = {
        group.get("parts", "adamw"): {names[p] for p in group["params"] if p.dim() > 1}
        for group in muon_groups(model, split={"fused.weight": [2, 6]})
    }
    weights = {f"other_width.{name}_proj_weight" for name in "qkv"}
    assert found == {
        "adamw": {"embedding.weight", "head.weight", "convolution.weight", "column.weight"},
        1: {*weights, "attention.out_proj.weight", "other_width.out_proj.weight", "lstm.weight_hr_l0"},
        3: {"attention.in_proj_weight", "gru.weight_ih_l0", "gru.weight_hh_l0"},
        4: {"lstm.weight_ih_l0", "lstm.weight_hh_l0"},
        (2, 6): {"fused.weight"},
    }
    assert sum(len(group["params"]) for group in muon_groups(model)) == len(names)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_groups_of_a_wrapped_model_are_those_of_the_model() -> None:
    """Although DataParallel, DDP, torch.compile and checkpoint_wrapper change the names of parameters."""
    wrap: Any
    for wrap in (nn.DataParallel, partial(torch.compile, backend="eager"), checkpoint_wrapper):
        model: Any = nn.ModuleDict({"fc": nn.Linear(4, 5), "other": nn.Linear(4, 4, bias=False)})
        parts = nn.ModuleDict({name: wrap(part) for name, part in model.items()})
        wrapper: Any
        for wrapper in (
            model,
            nn.DataParallel(model),
            torch.compile(nn.DataParallel(model), backend="eager"),
            parts,
        ):
            adamw, muon = (group["params"] for group in muon_groups(wrapper, split={"oth*": 2}))
            assert nets.same(adamw, model.fc.parameters()) and nets.same(muon, [model.other.weight])


def test_a_shared_matrix_has_the_names_of_all_of_its_modules() -> None:
    model: Any = nn.ModuleDict(
        {"first": nn.Linear(4, 4, bias=False), "head": nn.Linear(4, 4), "mid": nn.Linear(4, 4)}
    )
    model.head.weight = model.first.weight
    for head in (None, ["head.*"], ["first.weight"]):
        *_, muon = muon_groups(model, head)
        assert nets.same(muon["params"], [model.mid.weight])


def test_momentum_in_bf16_without_nesterov_is_kept() -> None:
    """Although torch.optim.Muon would overwrite it, also if parameters are converted later."""
    momenta = []
    for converts in (False, True):
        model = nets.net()
        own = muon(model, nesterov=False, ns_precision="fp32" if not converts else "bf16")
        if converts:
            model.bfloat16()
        for step in range(3):
            for i, p in enumerate(model.parameters()):
                p.grad = torch.full_like(p, 1.0 + i + step)
            own.step()
        momenta.append(own.state[model.first.weight]["momentum_buffer"].float())
    assert torch.allclose(momenta[0], momenta[1], rtol=0.01)


def test_a_state_with_lists_is_that_with_tuples() -> None:
    """Full states of torch.distributed.checkpoint have lists in place of tuples."""
    own = muon(nets.net(), {"first*": [2, 6]})
    state = own.state_dict()
    for group in state["param_groups"]:
        group.update({key: list(value) for key, value in group.items() if isinstance(value, tuple)})
    muon(nets.net(), {"first*": [2, 6]}).load_state_dict(state)


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nets.net()
    phase = torch.zeros(2, 2, dtype=torch.complex64)
    other = muon(nets.net(), {"spare*": 2})
    wrong = [[{"params": [p], "muon": True}] for p in (phase, torch.zeros(3))]
    needs = "Muon needs momentum in"
    settings: list[tuple[dict[str, Any], str]] = [
        *(({"ns_steps": 0}, needs), ({"ns_steps": 2.5}, "a whole number"), ({"momentum": 1.0}, needs)),
        *(
            ({"nesterov": "no"}, "True or False"),
            ({"lr": -1.0}, "lr must be a finite number of 0 or more"),
            ({"eps": -1.0}, "eps must"),
        ),
        ({"ns_precision": "fp16"}, "ns_precision must be one of auto, bf16, fp32"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn must be one of match_rms_adamw, original, None"),
    ]
    refused: list[tuple[dict[str, Any], str]] = [
        *settings,
        *(({"muon_lr_ratio": ratio}, "must be above 0 and finite") for ratio in (0.0, math.inf)),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"split": {"first*": 3}}, "cannot be split into parts=3"),
        ({"split": {"last*": 2}}, r"no matrix of Muon has a name like 'last\*'"),
    ]
    own = muon(model)
    of_group = [*settings, ({"muon_lr_ratio": 3.0}, "is not a setting of a group")]
    added = [({"params": [torch.zeros(2, 2)], "muon": True, **group}, words) for group, words in of_group]
    added.append(({"params": [torch.zeros(3)], "muon": True}, "Muon takes real matrices"))
    added.append(({"params": [("name", torch.zeros(2, 2))], "muon": True, "parts": 3}, "into parts=3"))
    added.append(({"params": [torch.zeros(3)], "betas": (0.9, 2.0)}, "betas must be"))
    check_refusals(
        *((partial(muon, model, **options), words) for options, words in refused),
        *((partial(own.add_param_group, group), words) for group, words in added),
        (lambda: muon_groups(model, ["output.*"]), "no parameter has a name like 'output.*'"),
        (lambda: muon_groups(nn.Embedding(3, 3)), "the model has no matrix for Muon"),
        (lambda: muon_groups(model.parameters()), r"a model, not generator: muon_groups\(model\)"),
        (lambda: MuonWithAdamW(model.parameters()), "no group has muon=True"),
        (lambda: MuonWithAdamW(model), r"not a model: MuonWithAdamW\(muon_groups\(model\)\)"),
        (lambda: own.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict()), "without Muon, which"),
        *((partial(MuonWithAdamW, groups), "Muon takes real matrices") for groups in wrong),
        (lambda: muon(model).load_state_dict(other.state_dict()), "other groups of Muon and AdamW"),
        (lambda: nets.wrap(model, nets.alone(), muon, compression=nets.dgc()), "would apply it again"),
    )
    assert len(own.param_groups) == len(muon(model).param_groups)  # no group was added
    with pytest.raises(TypeError, match="param_group must be a dict, not list"):
        own.add_param_group([torch.zeros(2, 2)])
    own.add_param_group({"params": torch.zeros(4, 2, requires_grad=True), "muon": True, "parts": 2})
    own.param_groups[-1]["params"][0].grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(ValueError, match=r"needs dense gradients, and a gradient of shape \(4, 2\) is sparse"):
        own.step()

    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ImportError, match=r"dgc.optim.MuonWithAdamW works with torch 2.9 to .*no Muon"):
        muon(nets.net())
