"""LocalOptimizer around every algorithm: weights that are loaded after it was built, dropped steps, states."""

import copy
import io
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gossip import networks as nets
from on_ranks import on_ranks
from refusals import refuse
from states import assert_equal
from torch import Tensor, nn

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import NonFiniteGradientError
from dgc.contrib import ZeroOneAdam, ZeroOneSteps
from dgc.core.state import with_tensors
from dgc.gossip import SGP
from dgc.local import Nesterov, OuterSteps, SlowMo
from dgc.optim import LocalOptimizer

pytestmark = pytest.mark.usefixtures("no_type_checks")

METHODS: dict[str, Callable[[], Any]] = {row.name: row.make for row in (*nets.ROWS, *nets.OUTER, *nets.MORE)}
METHODS |= {f"{name}, machines": nets.of_machines(base) for name, base in nets.BASES.items()}
METHODS |= {"0/1 adam": partial(ZeroOneSteps, 2, local_step_scaler=2, local_step_clipper=4)}
OPTIMIZERS: dict[str, Any] = {"0/1 adam": ZeroOneAdam}  # that a method needs
# of messages in 8 bits, and the weight decay of an outer optimizer
ROUNDING = {name: 0.5 for name in METHODS if "int8" in name} | {"outer adam, signs": 0.1}
WEIGHTS = torch.arange(1.0, 94.0)  # of nets.Trained


def standing(name: str, transport: Any, **options: Any) -> nets.Trained:
    """One whose steps change nothing."""
    make = OPTIMIZERS.get(name, partial(torch.optim.SGD, momentum=0.9))
    return nets.Trained(transport, METHODS[name](), partial(make, lr=0.0), **options)


def load(own: nets.Trained, weights: Tensor) -> None:
    """As `model.load_state_dict` does."""
    with torch.no_grad():
        for p, part in zip(own.model.parameters(), weights.split([54, 9, 27, 3]), strict=True):
            p.copy_(part.view_as(p))


def values(own: nets.Trained) -> Tensor:
    return torch.cat([p.detach().flatten() for p in own.model.parameters()])


@pytest.mark.parametrize("name", METHODS)
def test_weights_that_are_loaded_after_the_optimizer_was_built_are_the_start(name: str) -> None:
    def body(transport: Any) -> Tensor:
        own = standing(name, transport)
        load(own, WEIGHTS)
        own.steps(8)
        own.finish()
        return values(own)

    for found in LockstepWorld(2, 1).run(body):
        torch.testing.assert_close(found, WEIGHTS, rtol=0, atol=ROUNDING.get(name, 1e-4))


def test_diloco_leaves_loaded_weights_as_they_are() -> None:
    """Not what they were when the optimizer was built, which outer momentum would amplify."""

    def body(transport: Any, outer: Any) -> Any:
        p = nn.Parameter(torch.zeros(4))
        inner = torch.optim.SGD([p], lr=0.0)
        optimizer = LocalOptimizer(inner, [("p", p)], OuterSteps(2, outer=outer), transport=transport)
        optimizer.zero_grad()
        p.data.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        for _ in range(8):
            optimizer.zero_grad()
            p.grad = torch.ones(4)
            optimizer.step()
        return p.tolist()

    for outer in (Nesterov(), SlowMo(), None):
        assert LockstepWorld(2).run(partial(body, outer=outer)) == [[1.0, 2.0, 3.0, 4.0]] * 2


@pytest.mark.parametrize("name", ["diloco, top-k", "pga", "local sgd, machines", "0/1 adam"])
@on_ranks(2, 1)
def test_different_weights_that_ranks_have_loaded_are_an_error_of_every_rank(transport: Any, name: str) -> None:
    own = standing(name, transport)
    load(own, WEIGHTS + transport.rank)
    for _ in range(2):
        refuse("rank 1 has another model at the first step than rank 0: load the same weights on every", own.step)


@on_ranks(2)
def test_what_a_rank_changes_in_its_first_forward_pass_is_its_progress(transport: Any) -> None:
    """As an embedding with max_norm does."""
    own = standing("local sgd", transport)
    load(own, WEIGHTS)
    own.optimizer.zero_grad()
    load(own, WEIGHTS + transport.rank)
    own.optimizer.step()
    own.steps(3)
    torch.testing.assert_close(values(own), WEIGHTS + 0.5, rtol=0, atol=1e-5)


@on_ranks(2)
def test_a_change_of_half_precision_parameters_between_steps_is_not_lost_with_the_messages(transport: Any) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        own = nets.Trained(transport, SGP(), partial(torch.optim.SGD, lr=0.0), dtype)
        for _ in range(3):
            own.step()
            with torch.no_grad():
                own.model[2].bias += 4.0
        found.append(own.finish())
    torch.testing.assert_close(*found, rtol=0, atol=0.1)


@pytest.mark.parametrize("name", ["local sgd", "sgp", "choco", "0/1 adam"])
@on_ranks(2)
def test_weights_that_are_loaded_after_a_state_are_refused(transport: Any, name: str) -> None:
    own = standing(name, transport)
    own.steps(3)
    state, expected = own.state(), values(own)
    other = standing(name, transport)
    load(other, WEIGHTS)
    other.resume(state)
    assert torch.equal(values(other), expected)
    other.step()
    other.resume(state)
    if transport.rank == 1:
        load(other, WEIGHTS)
    refuse("the parameters of rank 1 were changed after load_compression_state_dict", other.step)


@on_ranks(2)
def test_a_state_that_was_saved_before_the_first_step_lets_weights_be_loaded(transport: Any) -> None:
    own = standing("diloco", transport)
    own.resume(own.state())
    load(own, WEIGHTS)
    with own.optimizer.consensus():
        assert torch.equal(values(own), WEIGHTS)
    own.steps(4)
    assert torch.equal(values(own), WEIGHTS)


# --- gradients that are not finite ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*gradient of .* on rank 1 has NaN or inf")
@pytest.mark.parametrize(("name", "size", "local_size"), [*((n, 2, 1) for n in METHODS), ("sgp, machines", 4, 2)])
def test_ranks_go_on_together_after_an_error_about_a_gradient_of_one(
    name: str, size: int, local_size: int
) -> None:
    """As if its step was skipped."""

    def body(transport: Any, nonfinite: str) -> Any:
        make = partial(OPTIMIZERS.get(name, nets.momentum), lr=0.01)
        own, raised = nets.Trained(transport, METHODS[name](), make, nonfinite=nonfinite), 0
        for step in range(7):
            own.optimizer.zero_grad()
            own.loss().backward()
            if (step, transport.rank) in ((0, 1), (3, 1)):
                own.model[0].bias.grad[2] = torch.nan
            try:
                own.optimizer.step()
            except NonFiniteGradientError:
                raised += 1
        return own.finish(), own.optimizer.dropped_steps, raised

    skipped, found = (
        LockstepWorld(size, local_size).run(partial(body, nonfinite=how)) for how in ("skip", "raise")
    )
    expected = [2 if local_size > 1 else 0, 2, 0, 0][:size]  # the ranks of a machine step together
    assert [raised for *_, raised in found] == [dropped for _, dropped, _ in skipped] == expected
    assert [dropped for _, dropped, _ in found] == [dropped for _, dropped, _ in skipped]
    assert nets.same([z for z, *_ in found], [z for z, *_ in skipped])


# --- closures -------------------------------------------------------------------------------------------


def closure_of(own: nets.Trained, calls: list[int]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        calls.append(1)
        own.optimizer.zero_grad()
        loss = own.loss()
        loss.backward()
        return loss

    return closure


@on_ranks(1)
def test_lbfgs_takes_its_own_steps_within_a_local_step(transport: Any) -> None:
    lbfgs = partial(torch.optim.LBFGS, lr=0.5, max_iter=5)
    own, alone = (nets.Trained(transport, OuterSteps(100), lbfgs) for _ in range(2))
    alone.optimizer.close()
    calls: tuple[list[int], list[int]] = ([], [])
    for _ in range(3):
        loss = own.optimizer.step(closure_of(own, calls[0]))
        expected = alone.optimizer.inner.step(closure_of(alone, calls[1]))
        assert torch.equal(loss, expected)
    assert torch.equal(values(own), values(alone)) and len(calls[0]) == len(calls[1]) > 6
    refuse(r"LBFGS computes the loss in its step: call step\(closure\)", own.optimizer.step)


@pytest.mark.parametrize("name", ["osgp", "choco", "diloco, top-k"])
@on_ranks(2)
def test_ranks_that_step_with_lbfgs_go_on_from_a_saved_state(transport: Any, name: str) -> None:
    lbfgs = partial(torch.optim.LBFGS, lr=0.1, max_iter=3)
    own = nets.Trained(transport, METHODS[name](), lbfgs)
    for _ in range(4):
        own.optimizer.step(closure_of(own, []))
    other = nets.Trained(transport, METHODS[name](), lbfgs).resume(own.state())
    for one in (own, other):
        for _ in range(4):
            one.optimizer.step(closure_of(one, []))
    assert torch.equal(values(own), values(other))


@pytest.mark.parametrize("name", ["diloco, top-k", "sgp", "0/1 adam", "sgp, machines"])
def test_an_optimizer_that_calls_its_closure_once_steps_as_without_one(name: str) -> None:
    def body(transport: Any, with_closure: bool) -> Tensor:
        own = nets.Trained(transport, METHODS[name](), partial(OPTIMIZERS.get(name, nets.momentum), lr=0.01))
        for _ in range(5):
            own.optimizer.step(closure_of(own, [])) if with_closure else own.step()
        return own.finish()

    assert nets.same(*(LockstepWorld(2, 1).run(partial(body, with_closure=how)) for how in (True, False)))


@on_ranks(2)
def test_steps_that_a_machine_takes_together_have_no_further_calls_of_a_closure(transport: Any) -> None:
    replica_groups = METHODS["sgp, machines"]
    refuse("LBFGS computes the loss several times", nets.Trained, transport, replica_groups(), torch.optim.LBFGS)
    own = nets.Trained(transport, replica_groups())
    own.optimizer.inner.step = lambda closure: (closure(), closure())
    refuse("SGD computes the loss several times", own.optimizer.step, closure_of(own, []))


# --- states ---------------------------------------------------------------------------------------------


def copied(state: Any) -> Any:
    return with_tensors(torch.clone, state)


@pytest.mark.parametrize("name", METHODS)
@on_ranks(2, 1)
def test_training_changes_neither_a_saved_state_nor_one_that_was_loaded(transport: Any, name: str) -> None:
    def make() -> nets.Trained:
        return nets.Trained(transport, METHODS[name](), partial(OPTIMIZERS.get(name, nets.momentum), lr=0.01))

    own, loaded = make(), make()
    own.steps(7)
    state = own.optimizer.compression_state_dict()
    expected = copied(state)
    own.steps(3)
    assert_equal(state, expected)
    loaded.resume(state).steps(3)
    assert_equal(state, expected)
    own.finish(), loaded.finish()
    assert torch.equal(values(own), values(loaded)) or "2 steps" in name  # OSGP's messages come at any time


@pytest.mark.parametrize("average_momentum", [False, True])
@on_ranks(1)
def test_a_part_of_the_model_is_saved_without_the_rest(transport: Any, average_momentum: bool) -> None:
    """Parameters and momenta share the memory of one vector, and torch saves and copies whole storages."""
    own = nets.Trained(transport, OuterSteps(2, average_momentum=average_momentum))
    own.steps(3)
    for module in (own.model[2], copy.deepcopy(own.model)[2]):
        saved = io.BytesIO()
        torch.save(module.state_dict(), saved)
        saved.seek(0)
        tensors = torch.load(saved, weights_only=True)
        assert [tensor.untyped_storage().nbytes() for tensor in tensors.values()] == [4 * 27, 4 * 3]
        assert torch.equal(torch.cat([tensor.flatten() for tensor in tensors.values()]), own.z[63:93])
    states = own.optimizer.state_dict()["state"].values()
    assert [state["momentum_buffer"].untyped_storage().nbytes() for state in states] == [
        4 * 54,
        4 * 9,
        4 * 27,
        4 * 3,
    ]
    assert all(p.data_ptr() == s.of(own.z).data_ptr() for p, s in own.optimizer.model.pairs())


@on_ranks(2)
def test_parameters_whose_memory_was_moved_or_resized_stay_those_of_the_model(transport: Any) -> None:
    """As torch.multiprocessing moves what is sent to another process."""

    def body(moves: bool) -> Tensor:
        own = nets.Trained(transport, OuterSteps(2, SGP()))
        for step in range(5):
            own.optimizer.zero_grad()
            own.loss().backward()
            if moves and step % 2:
                own.model.share_memory()
            own.optimizer.step()
            if moves and not step % 2:
                own.model[0].weight.data = own.model[0].weight.data.clone()
        own.finish()
        return values(own)

    assert torch.equal(body(True), body(False))


def check_equal_steps(transport: Any, **options: Any) -> None:
    """Steps of a compiled model or of a fused optimizer end with the model of plain ones."""
    make = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    own = nets.Trained(transport, OuterSteps(2), partial(make, fused=options.get("fused", False)))
    other = nets.Trained(transport, OuterSteps(2), make)
    if options.get("compiled", False):
        own.model = torch.compile(own.model, backend="eager")
    for one in (own, other):
        one.steps(4)
    torch.testing.assert_close(own.z, other.z)


@on_ranks(2)
def test_a_compiled_model_steps_on_the_memory_of_the_model(transport: Any) -> None:
    check_equal_steps(transport, compiled=True)


@on_ranks(2)
def test_a_fused_optimizer_steps_on_the_memory_of_the_model(transport: Any) -> None:
    check_equal_steps(transport, fused=True)


def spoilt(state: Any, *path: Any, by: Callable[[Any], Any]) -> Any:
    """A copy with the value at this place changed."""
    whole = copy.deepcopy(state)
    holder = whole
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = by(holder[path[-1]])
    return whole


def nan(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan)


OUTER: dict[str, Callable[[], Any]] = {
    "plain": lambda: OuterSteps(2),
    "diloco": lambda: OuterSteps(2, None, Nesterov(), nets.top_k()),
    "momentum": lambda: OuterSteps(2, None, Nesterov(), nets.top_k(), average_momentum=True),
    "slowmo": lambda: OuterSteps(2, outer=SlowMo()),
    "pga": lambda: OuterSteps(2, SGP()),
    "sgp": SGP,
    "0/1 adam": METHODS["0/1 adam"],
}
BUFFER = ("optimizer", "state", 0, "momentum_buffer")
OF_OUTER = ("OuterSteps.0", "outer", "0.weight")
WRONG: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "momentum transposed": (
        "diloco",
        r"has shape \(6, 9\), and the parameter \(9, 6\)",
        lambda s: spoilt(s, *BUFFER, by=lambda t: t.mT),
    ),
    "momentum of one element": (
        "momentum",
        r"has shape \(1, 1\)",
        lambda s: spoilt(s, *BUFFER, by=lambda t: t[:1, :1]),
    ),
    "momentum with nan": (
        "sgp",
        "momentum_buffer of parameter 0 of the optimizer's state has NaN",
        lambda s: spoilt(s, *BUFFER, by=nan),
    ),
    "moments of adam": (
        "momentum",
        "keeps .'exp_avg', 'momentum_buffer'. of 0.weight",
        lambda s: spoilt(s, *BUFFER[:3], by=lambda d: {**d, "exp_avg": d["momentum_buffer"]}),
    ),
    "moment of another shape": (
        "0/1 adam",
        r"exp_avg of parameter 0 .* has shape \(9, 5\)",
        lambda s: spoilt(s, *BUFFER[:3], "exp_avg", by=lambda t: t[:, :5]),
    ),
    "fewer groups": (
        "diloco",
        "is damaged, or from other parameters",
        lambda s: spoilt(s, "optimizer", "param_groups", by=lambda groups: []),
    ),
    "outer momentum of another shape": (
        "diloco",
        r"outer momentum_buffer of 0.weight has shape \(6, 9\)",
        lambda s: spoilt(s, *OF_OUTER, "momentum_buffer", by=lambda t: t.mT),
    ),
    "outer momentum with nan": (
        "momentum",
        "outer momentum_buffer of 0.weight has NaN",
        lambda s: spoilt(s, *OF_OUTER, "momentum_buffer", by=nan),
    ),
    "momentum of all with nan": ("momentum", "z has NaN", lambda s: spoilt(s, "OuterSteps.0", "z", by=nan)),
    "no identity": (
        "diloco",
        "the state has no identity",
        lambda s: {k: v for k, v in s.items() if k != "identity"},
    ),
    "residual": (
        "diloco",
        "errors of 0.weight has NaN|has NaN",
        lambda s: spoilt(s, "OuterSteps.0", "compression", "SparseCompressor.0", "residuals", "0.weight", by=nan),
    ),
    "base": ("pga", "has NaN", lambda s: spoilt(s, "OuterSteps.0", "base", "z", by=nan)),
}


def damaged(name: str, transport: Any) -> nets.Trained:
    own = nets.Trained(transport, OUTER[name](), OPTIMIZERS.get(name, nets.momentum))
    own.steps(5)
    return own


def check_refused(own: nets.Trained, state: Any, words: str) -> None:
    before = copied(own.optimizer.compression_state_dict())
    refuse(words, own.optimizer.load_compression_state_dict, state)
    assert_equal(own.optimizer.compression_state_dict(), before)


@pytest.mark.parametrize("case", WRONG)
@on_ranks(1)
def test_a_state_that_cannot_be_right_is_refused_before_anything_changes(transport: Any, case: str) -> None:
    name, words, change = WRONG[case]
    own, other = damaged(name, transport), damaged(name, transport)
    other.step()
    state = change(other.state())
    check_refused(own, state, words)
    if words.startswith("has shape") or "momentum" in case and "outer" not in case and "all" not in case:
        refuse(words, own.optimizer.load_state_dict, state["optimizer"])


@pytest.mark.parametrize(("saved", "loaded"), [*itertools.permutations(("plain", "diloco", "slowmo"), 2)])
@on_ranks(1)
def test_the_state_of_another_outer_optimizer_is_refused(transport: Any, saved: str, loaded: str) -> None:
    outer = {"plain": None, "diloco": Nesterov(), "slowmo": SlowMo()}
    one, own = (nets.Trained(transport, OuterSteps(2, outer=outer[name])) for name in (saved, loaded))
    one.steps(3)
    check_refused(own, one.state(), "the outer optimizer keeps .* it was saved with another outer optimizer")
    early = nets.Trained(transport, OuterSteps(2, outer=outer[saved]))
    early.step()
    own.resume(early.state())  # nothing is kept yet
