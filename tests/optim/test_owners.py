"""Muon by owners: how matrices are dealt, the messages to owners and back, and what is refused."""

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from optim import nets
from refusals import check_refusals
from torch import Tensor, nn

from dgc.comm.lockstep import LockstepWorld
from dgc.comm.meter import TrafficMeter
from dgc.compression import TwoPhaseCompressor
from dgc.local import OuterSteps
from dgc.optim import LocalOptimizer, MuonWithAdamW, muon_groups
from dgc.optim import broadcast_optimizer_state as broadcast
from dgc.optim.owners import Exchange, Layout, Piece, TransportRanks, deal, matrices_of, replicated, sharded

pytestmark = [
    pytest.mark.usefixtures("no_type_checks"),
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9"),
]
SIZES = [1, 2, 3, 5]
Parameter = tuple[tuple[int, ...], Any, Layout]  # shape, parts, layout


# --- who owns what --------------------------------------------------------------------------------


def dealt(parameters: Sequence[Parameter], ranks: int) -> tuple[list[int], list[int]]:
    """The owners of all matrices, and the cost of each rank's."""
    matrices = [m for i, (shape, parts, _) in enumerate(parameters) for m in matrices_of(i, shape, parts)]
    owners = deal(matrices, [layout for *_, layout in parameters], ranks)
    loads = [sum(m.cost for m, owner in zip(matrices, owners, strict=True) if owner == r) for r in range(ranks)]
    return owners, loads


def test_the_cost_of_a_matrix_is_that_of_its_products() -> None:
    costs = [m.cost for shape in ((4, 6), (6, 4)) for m in matrices_of(0, shape, 1)]
    assert costs == [4 * 6 * 4] * 2


def test_equal_matrices_are_dealt_evenly() -> None:
    _, loads = dealt([((8, 8), 1, replicated((8, 8), 4))] * 12, 4)
    assert loads == [3 * 512] * 4


def test_a_large_matrix_counts_as_much_as_many_small_ones() -> None:
    """64 matrices of 16 x 16 cost as much as one of 64 x 64."""
    shapes = [(64, 64), *[(16, 16)] * 64]
    owners, loads = dealt([(shape, 1, replicated(shape, 2)) for shape in shapes], 2)
    assert loads == [64**3] * 2 and owners == [0, *[1] * 64]


def test_the_parts_of_a_parameter_may_have_different_owners() -> None:
    owners, _ = dealt([((12, 4), 3, replicated((12, 4), 3))], 3)
    assert sorted(owners) == [0, 1, 2]


def test_an_expert_stays_on_the_rank_that_has_it() -> None:
    shape = (4, 6, 6)
    owners, _ = dealt([(shape, 1, sharded(shape, [2], [0]))], 2)
    assert owners == [0, 0, 1, 1]


def test_other_matrices_go_to_the_ranks_with_fewer_experts() -> None:
    stack, matrix = (3, 6, 6), (6, 6)  # rank 0 has two experts of three
    parameters = [(matrix, 1, sharded(matrix, [2], [0])), (stack, 1, sharded(stack, [2], [0]))]
    assert dealt(parameters, 2)[0] == [1, 0, 0, 1]


def test_an_expert_goes_to_one_of_its_replicas() -> None:
    shape = (2, 6, 6)
    owners, loads = dealt([(shape, 1, sharded(shape, [2, 2], [None, 0]))] * 2, 4)
    assert owners == [0, 1, 2, 3] and len(set(loads)) == 1


# --- the messages ---------------------------------------------------------------------------------


MESHES: dict[str, tuple[int, Any]] = {  # the number of ranks, and the layout of a shape
    "whole": (3, replicated),
    "rows": (3, lambda shape, n: sharded(shape, [n], [len(shape) - 2])),
    "columns": (3, lambda shape, n: sharded(shape, [n], [len(shape) - 1])),
    "places": (2, lambda shape, n: sharded(shape, [n], [0])),
    "rows of replicas": (4, lambda shape, n: sharded(shape, [2, 2], [None, len(shape) - 2])),
    "replicas of rows": (4, lambda shape, n: sharded(shape, [2, 2], [len(shape) - 2, None])),
    "rows of places": (4, lambda shape, n: sharded(shape, [2, 2], [0, len(shape) - 2])),
    "rows of rows": (6, lambda shape, n: sharded(shape, [2, 3], [len(shape) - 2] * 2)),
}
SHAPES: list[tuple[tuple[int, ...], Any]] = [
    *(((7, 5), 1), ((1, 6), 1), ((9, 4), 3), ((8, 3), (2, 6)), ((5, 7), 1)),
    *(((3, 4, 6), 1), ((5, 6, 2), 2)),
]


class Held:
    """What a rank holds of parameters, with the exchange of their matrices."""

    def __init__(self, transport: Any, name: str, shapes: Any, values: Sequence[Tensor]):
        ranks, make = MESHES[name]
        layouts = [make(shape, ranks) for shape, _ in shapes]
        matrices = [m for i, (shape, parts) in enumerate(shapes) for m in matrices_of(i, shape, parts)]
        self.meter = TrafficMeter()
        self.exchange = Exchange(TransportRanks(transport, self.meter, "muon"), matrices, layouts)
        boxes = [layout.boxes[transport.rank] for layout in layouts]
        self.parts = [v[tuple(slice(*d) for d in box)].clone() for v, box in zip(values, boxes, strict=True)]

    def of(self, tensors: list[Tensor], piece: Piece) -> Tensor:
        matrix = self.exchange.matrices[piece.matrix]
        return matrix.of(tensors[matrix.parameter], self.exchange.box(matrix), piece.part)

    def gather(self) -> list[Tensor]:
        return self.exchange.gather(partial(self.of, self.parts), torch.empty(0))

    def scatter(self, updates: Sequence[Tensor]) -> list[Tensor]:
        """By parameter, this rank's part of the updates."""
        results = [torch.full_like(part, math.nan) for part in self.parts]
        for piece, update in self.exchange.scatter(updates, torch.empty(0)):
            self.of(results, piece).copy_(update)
        return results


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[1:2]], ids=["several", "one row"])
def test_owners_get_whole_matrices_and_ranks_get_their_parts_back(name: str, shapes: Any) -> None:
    """Owners double their matrices, each of which has one owner."""
    values = [torch.rand(shape, generator=torch.Generator().manual_seed(i)) for i, (shape, _) in enumerate(shapes)]

    def body(transport: Any) -> list[int]:
        held = Held(transport, name, shapes, values)
        exchange, found = held.exchange, held.gather()
        for i, matrix in zip(exchange.own, found, strict=True):
            own, value = exchange.matrices[i], values[exchange.matrices[i].parameter]
            assert torch.equal(matrix, own.of(value, tuple((0, n) for n in value.shape), own.whole))
        for part, result in zip(held.parts, held.scatter([2 * matrix for matrix in found]), strict=True):
            assert torch.equal(result, 2 * part)
        return exchange.own

    owned = [i for own in LockstepWorld(MESHES[name][0]).run(body) for i in own]
    assert sorted(owned) == list(range(len(owned)))


# of 6 elements of fp32 in one matrix
BYTES: list[tuple[str, Any, int]] = [
    ("whole", (6, 1), 3 * 2 * 24),  # an all-gather of 24 bytes
    ("rows", (6, 1), 2 * 8 + 2 * 8),  # 2 of 3 ranks send their rows, and receive them
    ("rows of replicas", (6, 1), 12 + 3 * 12),  # a replica gathers, and all but the owner receive
    ("places", (2, 3, 1), 0),
]


@pytest.mark.parametrize(("name", "shape", "sent"), BYTES)
def test_ranks_send_to_the_owner_and_receive_what_they_hold(name: str, shape: Any, sent: int) -> None:
    def body(transport: Any) -> float:
        held = Held(transport, name, [(shape, 1)], [torch.ones(shape)])
        held.scatter(held.gather())
        return held.meter.wire_bytes

    assert sum(LockstepWorld(MESHES[name][0]).run(body)) == sent


# --- steps of ranks that have the same mean gradients -----------------------------------------------


def owned(model: Any, split: Any = None, **options: Any) -> Any:
    return MuonWithAdamW(muon_groups(model, ["last.*"], split), **{"lr": 0.01, "owners": "on", **options})


every_rank = partial(owned, owners="off")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("split", [None, {"first*": [2, 6], "spare*": 2}], ids=["whole", "parts"])
def test_owners_train_the_model_that_every_rank_trains(split: Any, precision: str) -> None:
    options: Any = {"split": split, "ns_precision": precision}
    expected = nets.trained(1, range(4), partial(every_rank, **options))
    for size in SIZES:

        def body(model: Any, transport: Any) -> None:
            nets.train(model, nets.wrap(model, transport, partial(owned, **options)), range(4))

        nets.assert_same(nets.run(size, body)[0], expected)


def test_equal_matrices_are_iterated_together_as_alone() -> None:
    def layers() -> nn.ModuleList:
        return nn.ModuleList([nets.net(seed) for seed in range(3)])

    def train(models: Any, optimizer: Any) -> None:
        for step in range(3):
            for net in models:
                nets.loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    def groups(model: Any) -> Any:
        return muon_groups(model, ["*.last.*"])

    def body(transport: Any) -> Any:
        model = layers()
        train(model, MuonWithAdamW(groups(model), owners="on", transport=transport))
        return nets.values(model)

    expected = layers()
    train(expected, MuonWithAdamW(groups(expected)))
    first, second = LockstepWorld(2).run(body)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, nets.values(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_one_rank_with_owners_has_the_bits_of_one_without(precision: str) -> None:
    models = [nets.trained(1, range(3), partial(make, ns_precision=precision)) for make in (owned, every_rank)]
    nets.assert_same(*models, exactly=True)


TORCHS: list[dict[str, Any]] = [
    {},
    {"nesterov": False},
    {"adjust_lr_fn": "original"},
    {"ns_steps": 3, "momentum": 0.8, "weight_decay": 0.0},
]


@pytest.mark.parametrize("options", TORCHS, ids=str)
@pytest.mark.parametrize("owners", ["auto", "on", "off"])
def test_one_rank_has_the_bits_of_torchs_muon(options: dict[str, Any], owners: str) -> None:
    """For wide, high and square matrices, some of one shape."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 24), (24, 8), (16, 16), (16, 16), (5, 7)]
    start, *gradients = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4))
    own, torchs = ([nn.Parameter(p.clone()) for p in start] for _ in range(2))
    transport = {"transport": nets.alone()} if owners == "on" else {}
    both = (
        MuonWithAdamW(
            [{"params": own, "muon": True}],
            lr=0.01,
            muon_lr_ratio=1.0,
            ns_precision="bf16",
            owners=owners,
            **transport,
            **options,
        ),
        torch.optim.Muon(torchs, lr=0.01, **{"adjust_lr_fn": "match_rms_adamw", **options}),
    )
    for of_step in gradients:
        for p, q, gradient in zip(own, torchs, of_step, strict=True):
            p.grad, q.grad = gradient, gradient.clone()
        for optimizer in both:
            optimizer.step()
    for p, q in zip(own, torchs, strict=True):
        assert torch.equal(p, q)


def test_updates_in_16_bits_are_near_those_in_32_and_equal_on_all_ranks() -> None:
    models = [
        nets.trained(3, range(3), partial(owned, ns_precision="fp32", update_bits=bits)) for bits in (16, 32)
    ]
    one, other = (
        torch.cat([(p - q).flatten() for p, q in zip(m.parameters(), nets.net().parameters(), strict=True)])
        for m in models
    )
    assert not torch.equal(one, other)
    assert (one - other).norm() < 0.005 * other.norm()


# for matrices of 6 x 8 and 8 x 8 on two ranks, each the owner of one
@pytest.mark.parametrize(("options", "size"), [({}, 4), ({"update_bits": 16}, 2), ({"ns_precision": "bf16"}, 2)])
def test_updates_count_in_the_meter_of_the_exchange(options: dict[str, Any], size: int) -> None:
    """A rank's contribution is as long as the largest."""

    def body(model: Any, transport: Any) -> None:
        optimizer = nets.wrap(model, transport, partial(owned, **{"ns_precision": "fp32", **options}))
        nets.train(model, optimizer, range(2))
        assert optimizer.meter.wire_bytes - optimizer.meter.dense_wire_bytes == 2 * size * 64

    nets.run(2, body)


# --- steps of which a rank lacks a part -------------------------------------------------------------


def test_a_matrix_without_a_gradient_stays() -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = owned(model, transport=transport)
        for step in range(3):
            optimizer.zero_grad()
            nets.loss_of(model, step, spare=step != 1).backward()
            before = model.spare.weight.detach().clone()
            optimizer.step()
            assert torch.equal(before, model.spare.weight) == (step == 1)

    nets.run(3, body)


def test_a_rank_without_gradients_keeps_no_other_waiting() -> None:
    """It sends zeros, and its own model stays: a step is to be dropped on all ranks."""

    def body(transport: Any) -> list[bool]:
        model = nets.net()
        optimizer, start = owned(model, transport=transport), nets.values(model)
        if transport.rank:
            nets.loss_of(model, 0).backward()
        optimizer.step()
        return [torch.equal(start[name], p) for name, p in model.named_parameters()]

    unchanged = LockstepWorld(2).run(body)
    assert all(unchanged[0]) and not any(unchanged[1][:1])


def test_a_dropped_step_leaves_the_model_of_all_ranks() -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = nets.wrap(model, transport, owned, compression=TwoPhaseCompressor(8))
        for step in range(4):
            optimizer.zero_grad()
            (nets.loss_of(model, step, transport.rank) * (math.nan if step == transport.rank else 1.0)).backward()
            before = nets.values(model)
            optimizer.step()
            dropped = all(
                torch.equal(value, p) for value, p in zip(before.values(), model.parameters(), strict=True)
            )
            assert dropped == (step < 2)
        assert optimizer.dropped_steps == 2

    with pytest.warns(UserWarning, match="dropped"):
        nets.run(2, body)


def test_a_state_is_created_without_the_other_ranks() -> None:
    """As Horovod's broadcast does on the ranks that have none, and torch.distributed.checkpoint."""
    trained = every_rank(nets.net())
    for group in trained.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    trained.step()

    def body(model: Any, transport: Any) -> None:
        optimizer = nets.wrap(model, transport, owned)

        def broadcast_optimizer_state() -> None:
            before = nets.values(model)
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            assert optimizer.state[model.first.weight]["momentum_buffer"].count_nonzero() == 0
            assert nets.same(before.values(), model.parameters())
            assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
            optimizer.zero_grad()

        if transport.rank == 0:
            broadcast_optimizer_state()
        else:
            optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
        broadcast(optimizer, 1, transport)
        nets.train(model, optimizer, range(2))

    nets.run(2, body)


# --- states -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"split": {"spare*": 2}, "ns_precision": "fp32"}], ids=["whole", "parts"])
def test_a_saved_state_goes_on(options: dict[str, Any]) -> None:
    def wrapped(model: Any, transport: Any) -> Any:
        return nets.wrap(model, transport, partial(owned, **options), compression=TwoPhaseCompressor(4))

    nets.check_that_a_saved_state_goes_on(wrapped, 3, used=2)


@pytest.mark.parametrize(("first", "make", "second"), [(1, every_rank, 3), (3, owned, 2), (2, owned, 1)])
def test_a_state_goes_on_on_another_number_of_ranks(first: int, make: Any, second: int) -> None:
    """Also one that was saved without owners."""
    saved: list[Any] = []

    def begin(model: Any, transport: Any) -> None:
        optimizer = nets.wrap(model, transport, make)
        nets.train(model, optimizer, range(3))
        saved[:] = [copy.deepcopy((model.state_dict(), optimizer.state_dict()))]

    def go_on(model: Any, transport: Any) -> None:
        weights, state = copy.deepcopy(saved[0])
        optimizer = nets.wrap(model, transport, owned)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        nets.train(model, optimizer, range(3, 6))

    nets.run(first, begin)
    nets.assert_same(nets.run(second, go_on)[0], nets.trained(1, range(6), every_rank))


def test_a_copy_shares_the_ranks_of_the_optimizer() -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = owned(model, transport=transport)
        nets.train(model, optimizer, range(1))
        other, copied = copy.deepcopy((model, optimizer))
        for net, own in ((model, optimizer), (other, copied)):
            nets.train(net, own, range(1, 3))
        nets.assert_same(model, other, exactly=True)

    nets.run(2, body)


# --- stacks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_matrices_of_a_stack_are_matrices_of_their_own(size: int, parts: int) -> None:
    start = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(0))

    def body(transport: Any) -> None:
        stack, matrices = nn.Parameter(start.clone()), [nn.Parameter(each.clone()) for each in start]
        both = [
            MuonWithAdamW([{"params": own, "muon": True, "parts": parts}], owners="on", transport=transport)
            for own in ([stack], matrices)
        ]
        for step in range(3):
            stack.grad = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(step))
            for p, gradient in zip(matrices, stack.grad, strict=True):
                p.grad = gradient
            for optimizer in both:
                optimizer.step()
        torch.testing.assert_close(stack.detach(), torch.stack([*matrices]).detach(), rtol=1e-5, atol=1e-6)
        assert not torch.equal(stack, start)

    LockstepWorld(size).run(body)


def test_a_state_in_which_adamw_has_the_experts_is_refused_with_the_cure() -> None:
    model = nn.ParameterDict({"experts": torch.rand(2, 3, 4), "w": torch.rand(4, 4)})
    saved = MuonWithAdamW(muon_groups(model, experts=False)).state_dict()
    words = "call muon_groups as in the run that saved it, with experts=False"
    check_refusals((lambda: MuonWithAdamW(muon_groups(model)).load_state_dict(saved), words))


# --- what is refused --------------------------------------------------------------------------------


def test_refused() -> None:
    model = nets.net()
    given = owned(model, transport=LockstepWorld(3).transports[0])
    check_refusals(
        (partial(owned, model, owners="all"), "owners must be one of auto, on, off, not 'all'"),
        (partial(owned, model, update_bits=8), "update_bits must be 16 or 32, not 8"),
        (partial(owned, model, transport=3), "transport must be what dgc.comm connects"),
        (partial(owned, model, owners="auto", transport=nets.alone()), 'no effect without owners="on"'),
        (
            lambda: nets.wrap(model, nets.alone(), lambda _: given),
            "over 3 ranks, and the gradients are the mean over 1",
        ),
        (
            lambda: LocalOptimizer(owned(model), model.named_parameters(), OuterSteps(2), transport=nets.alone()),
            'each rank steps on its own gradients: use owners="auto"',
        ),
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": {"spare*": 2}}, r"matrices.* on rank 0"),
        ({"update_bits": 16}, r"matrices\[0\] is 16 on rank 0 and 32 on rank 1"),
        ({"ns_steps": 4}, r"matrices\[1\]\[3\] is 4 on rank 0 and 5 on rank 1"),
        ({"ns_precision": "bf16"}, r"matrices\[1\]\[2\] is 'bf16' on rank 0 and 'fp32' on rank 1"),
    ],
)
def test_ranks_with_other_settings_are_refused(options: dict[str, Any], words: str) -> None:
    def body(transport: Any) -> None:
        model = nets.net()
        more = options if transport.rank == 0 else {}
        optimizer = owned(model, transport=transport, **{"ns_precision": "fp32", **more})
        nets.loss_of(model, 0).backward()
        with pytest.raises(ValueError, match=words):
            optimizer.step()

    LockstepWorld(2).run(body)
