"""Runs on every rank: scenarios of dgc.fsdp.quantize. Each function returns what it found."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from parallel.found import Finding, digest, told
from parallel.fsdp_worker import FEATURES, batches, loss_of, network, shard, shard_repeated, train, whole
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from dgc.fsdp import quantize, quantized
from dgc.gossip.model import local
from dgc.wire.envelope import PayloadError

MESHES: dict[str, Any] = {}


def mesh_of(transport: Any) -> Any:
    """The mesh of all ranks, created once: torch has meshes in its caches, so their groups must stay."""
    if "all" not in MESHES:
        MESHES["all"] = init_device_mesh("cpu", (transport.size,))
    return MESHES["all"]


class Tied(nn.Module):
    """The last layer has the weight of the first one. The middle one is not used by this rank, or by any rank."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(FEATURES, 9), nn.Linear(9, 9), nn.Linear(FEATURES, 9)
        self.last.weight, self.used = self.first.weight, used

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).tanh()
        if self.used:
            x = self.middle(x)
        return x.mean(1, keepdim=True) + self.last(torch.ones(FEATURES)).mean()


def columns(size: int, p: nn.Parameter) -> Shard | None:
    return Shard(1) if p.ndim == 2 and p.shape[1] % size == 0 else None


POLICIES: dict[str, Any] = {
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16 reduce": {"reduce_dtype": torch.bfloat16},
}


def build(transport: Any, name: str) -> Any:
    mesh = mesh_of(transport)
    if name == "repeated":
        return shard_repeated(mesh)
    if name == "tied":
        tied: Any = fully_shard(Tied(transport.rank == 0), mesh=mesh)
        tied.set_reduce_scatter_unused_params(True)  # else ranks would send FSDP2 different sizes
        return tied
    options: dict[str, Any] = {}
    if name in POLICIES:
        options["mp_policy"] = MixedPrecisionPolicy(**POLICIES[name])
    if name == "columns":
        options["shard_placement_fn"] = partial(columns, transport.size)
    if name == "resharded" and transport.size % 2 == 0:
        options["reshard_after_forward"] = 2
    model = network()
    if name == "frozen":
        model[2].requires_grad_(False)
        model[4].bias.requires_grad_(False)
    if name == "checkpointed":
        model[0] = checkpoint_wrapper(model[0])
    sharded: Any = shard(model, mesh, **options)
    if name == "divided":
        for module in (sharded[0], sharded[2], sharded):
            module.set_gradient_divide_factor(3.0)
            module.set_force_sum_reduction_for_comms(True)
    return sharded


MODELS = ("plain", "no sync", "repeated", "tied", "columns", "frozen", "checkpointed", "divided", *POLICIES)


def sum_of_gradients(model: Any, transport: Any, accumulate: bool = False) -> list[Tensor]:
    """The sums of what two steps get, of a model that does not change. Each has two backward passes."""
    sums = [torch.zeros(p.shape) for p in model.parameters() if p.requires_grad]
    inputs = batches(4, transport.rank)
    for step in range(2):
        model.zero_grad()
        for i in range(2):
            if accumulate:
                model.set_requires_gradient_sync(i == 1)
            loss_of(model, inputs[2 * step + i]).backward()
        for total, p in zip(sums, (p for p in model.parameters() if p.requires_grad), strict=True):
            if p.grad is not None:
                total += p.grad.full_tensor().float()
    return sums


def conserves(transport: Any) -> Finding:
    """What is sent and the error are the gradients: the largest difference, relative to the largest element."""
    found = {}
    for name in MODELS:
        expected = sum_of_gradients(build(transport, name), transport, name == "no sync")
        for bits, error in ((8, "float32"), (4, "int8"), *([(None, None)] if name == "plain" else [])):
            model = build(transport, name)
            quantizer = quantize(model, bits, error=error, hadamard=bits == 4)
            sums = sum_of_gradients(model, transport, name == "no sync")
            errors = quantizer.state_dict()["errors"]
            names = [n for n, p in model.named_parameters() if p.requires_grad]
            assert set(errors) == (set(names) if error else set())
            factor = {"divided": transport.size / 3.0}.get(name, 1.0)
            largest = max(float(e.abs().max()) for e in expected)
            difference = max(
                float((own + (factor * errors[n].full_tensor() if error else 0.0) - e).abs().max())
                for n, own, e in zip(names, sums, expected, strict=True)
            )
            found[f"{name} {bits} {error}"] = difference / largest
            quantizer.close()
            assert bits or quantizer.meter.payload_bytes == 0
    return found


def order(transport: Any) -> Finding:
    """What backward launches, gathers "g" and sums "s", and waits for, "G" and "S", by who reads gradients."""
    found, gradients = Finding(), dict[str, list[Any]]()
    real: dict[str, Any] = {"g": dist.all_gather_single, "s": quantized.exchange_rows}
    for reader in ("nothing", "parameters", "all-reduce"):
        model, early, events = build(transport, "plain"), dict[Tensor, Tensor](), list[str]()
        quantizer = quantize(model, 8, 8)
        for p in model.parameters() if reader == "parameters" else ():
            p.register_post_accumulate_grad_hook(lambda p, early=early: early.update({p: local(p.grad).clone()}))
        for module in (model[0], model[2], model) if reader == "all-reduce" else ():
            module.set_all_reduce_hook(lambda output: output.mul_(2))

        def launch(kind: str, *arguments: Any, events: list[str] = events, **options: Any) -> Any:
            def wait(*_: Any) -> None:
                events.append(kind.upper())
                for work in works:
                    work.wait()

            events.append(kind)
            begun = real[kind](*arguments, **options)
            works = begun if kind == "s" else [begun]
            return [Mock(wait=wait)] if kind == "s" else Mock(wait=wait)

        loss = loss_of(model, batches(1, transport.rank)[0])
        sums = patch.object(quantized, "exchange_rows", partial(launch, "s"))
        with sums, patch.object(dist, "all_gather_single", partial(launch, "g")):
            loss.backward()
        found[reader] = "".join(events)
        gradients[reader] = [local(p.grad) for p in model.parameters() if p.grad is not None]
        assert len(early) == len(gradients[reader]) * (reader == "parameters")
        assert all(p.grad is not None and own.equal(local(p.grad)) for p, own in early.items())
        quantizer.close()
    for own, same, twice in zip(*gradients.values(), strict=True):
        assert own.equal(same) and (2 * own).equal(twice)
    return found


def weights_in_use(transport: Any) -> Finding:
    """Forward and backward have the same rounded weights on all ranks, and the shards are not rounded."""
    found = Finding()
    for name in ("plain", "frozen", "bf16", "columns", "resharded"):
        model = build(transport, name)
        before, used = whole(model), list[str]()
        quantizer = quantize(model, None, 8)
        weights: list[Tensor] = []

        def note(module: Any, used: Any = used, weights: Any = weights) -> None:
            weights.append(
                module.weight.detach().float().clone()
            )  # the storage of a numpy array could not be freed
            used.append(digest(weights[-1:]))

        layer = model[0]

        def follow(module: Any, inputs: Any, output: Tensor, note: Any = note) -> None:
            output.register_hook(lambda gradient: note(module))

        layer.register_forward_pre_hook(lambda module, inputs, note=note: note(module))
        layer.register_forward_hook(follow)
        loss_of(model, batches(1, transport.rank)[0]).backward()
        assert torch.equal(whole(model), before) and len(used) == 2 and used[0] == used[1], name
        exact = layer.weight.full_tensor().detach()
        least = 2**-8 if name == "bf16" else 0
        assert (
            0 < float((weights[0] - exact).abs().max()) < float(exact.abs().max()) * (0.51 / 127 + 2**-8 + least)
        )
        handle = layer.unshard(async_op=True)
        handle.wait()
        assert digest([layer.weight.detach().float().clone()]) == used[0]
        layer.reshard()
        found[name] = used[0]
        quantizer.close()
        with torch.no_grad():
            layer.unshard()
        assert torch.equal(layer.weight.float(), exact.to(layer.weight.dtype).float())
        model.reshard()
    return found


def bytes_sent(transport: Any) -> Finding:
    """Payload bytes of one step and those of the formula, and the bytes that FSDP2 would have sent."""
    size, found = transport.size, Finding()
    for bits, block, weights in ((8, 256, None), (4, 128, 8), (4, 64, None)):
        model = build(transport, "plain")
        quantizer = quantize(model, bits, weights, block=block)
        loss_of(model, batches(1, 0)[0]).backward()
        formula = 0
        for g, part in enumerate((model[0], [model[2], model[3]], [model[4], model[5]])):
            modules = part if isinstance(part, list) else [part]
            shards = [-(-p.shape[0] // size) * p[0].numel() for m in modules for p in m.parameters()]
            for n, (b, s) in ((size, (bits, block)), *([(1 if g == 2 else 2, (8, 256))] if weights else [])):
                row = sum(-(-m // s) * (2 + s * b // 8) for m in shards)
                formula += n * (24 + -(-row // 8) * 8)
        found[f"{bits} {block} {weights}"] = quantizer.meter.payload_bytes - formula
        quantizer.close()
    return found


def nonfinite(transport: Any) -> Finding:
    """NaN in a gradient on the last rank, in the second of four steps."""
    found = Finding()
    for policy in ("skip", "raise", "scaler"):
        model = build(transport, "plain")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if policy == "scaler" else None
        kind = "raise" if policy == "raise" else "skip"
        quantizer = quantize(model, 4, nonfinite=kind, grad_scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        factors, messages = torch.ones(5), list[str]()

        def spoil(module: Any, inputs: Any, output: Tensor, factors: Tensor = factors) -> None:
            output.register_hook(lambda gradient: gradient * factors)

        model[0].register_forward_hook(spoil)
        for step, batch in enumerate(batches(4, transport.rank)):
            bad = transport.rank == transport.size - 1 and step == 1
            factors[4] = float("nan") if bad else 1.0
            before, error = whole(model), exact_error(quantizer)
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                messages.append(told((scaler.scale(loss) if scaler else loss).backward, RuntimeError))
                if scaler:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
            messages += [str(w.message) for w in caught if "every rank drops" in str(w.message)]
            dropped = step == 1
            assert torch.equal(whole(model), before) == dropped == (exact_error(quantizer) == error)
            assert all((p.grad is None) == (dropped and scaler is None) for p in model.parameters())
        assert quantizer.dropped_steps == 1 and (scaler is None or scaler.get_scale() == 2.0**9)
        found[policy] = {"model": digest([whole(model)]), "messages": [m for m in messages if m]}
        quantizer.close()
    return found


def interrupted(transport: Any) -> Finding:
    """An exception in backward, after one of three groups was reduced. Its next step is as if it had not been.

    FSDP2 itself keeps what it has of the gradients of the outermost module.
    """
    found = Finding()
    first, second = batches(2, transport.rank)

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("in backward")

    def hook(module: Any, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    for fails in (False, True):
        model = build(transport, "plain")
        quantizer = quantize(model, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        train(model, optimizer, [first])
        if fails:
            error, handle = exact_error(quantizer), model[0].register_forward_hook(hook)
            assert told(partial(train, model, optimizer, [second]), ArithmeticError) == "in backward"
            handle.remove()
            model.reset_iter_state()
            assert exact_error(quantizer) == error
        train(model, optimizer, [second])
        kept = quantizer.state_dict()["ranks"]
        found[str(fails)] = digest([model[2].weight.full_tensor(), kept["2.weight"].to_local()])
        quantizer.close()
    return found


def exact_error(quantizer: Any) -> str:
    return digest(part.to_local() for part in quantizer.state_dict()["ranks"].values())


def saved_and_loaded(transport: Any, folder: Path) -> Finding:
    """A run that is continued from a checkpoint ends with the bits of the run that saved it."""
    inputs, found = batches(6, transport.rank), Finding()
    for error in ("int8", "float32"):

        def start(error: str = error) -> tuple[Any, Any, Any]:
            model = build(transport, "plain")
            quantizer = quantize(model, 4, 8, error=error)
            return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), quantizer

        model, optimizer, quantizer = start()
        train(model, optimizer, inputs[:3])
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "gradients": quantizer.state_dict()}
        checkpoint.save(saved, checkpoint_id=folder / error)
        means = {name: mean.full_tensor() for name, mean in saved["gradients"]["errors"].items()}
        train(model, optimizer, inputs[3:])
        end = digest([whole(model)]), exact_error(quantizer)
        quantizer.close()

        model, optimizer, quantizer = start()
        weights, state = get_state_dict(model, optimizer)
        loaded: Any = {"model": weights, "optimizer": state, "gradients": quantizer.state_dict()}
        checkpoint.load(loaded, checkpoint_id=folder / error)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        quantizer.load_state_dict(loaded["gradients"])
        train(model, optimizer, inputs[3:])
        found[error] = (digest([whole(model)]), exact_error(quantizer)) == end
        quantizer.close()

        # two ranks load what more have saved
        members = [0, 1]
        if "two" not in MESHES:
            MESHES["two"] = DeviceMesh("cpu", members)
        if transport.rank in members:
            model = shard(network(), MESHES["two"])
            quantizer = quantize(model, 4, error=error)
            mean, two = quantizer.state_dict(of_each_rank=False), MESHES["two"].get_group()
            checkpoint.load({"gradients": mean}, checkpoint_id=folder / error, process_group=two)
            quantizer.load_state_dict(mean)
            for name, own in quantizer.state_dict()["errors"].items():
                near = float(means[name].abs().max()) * (0.51 / 127 + 2**-8 if error == "int8" else 1e-6)
                assert float((own.full_tensor() - means[name]).abs().max()) <= near, (error, name)
            quantizer.close()
    return found


def refused(transport: Any) -> None:
    """Each is refused with one error on every rank."""
    batch = batches(1, transport.rank)[0]

    def check(message: str, act: Callable[[], Any], *kinds: type[Exception]) -> None:
        text = told(act, *kinds)
        assert message in text, (message, text)

    model = build(transport, "plain")
    start = partial(quantize, model)
    check("gradients must be one of 8, 4, None, not 3", partial(start, 3), ValueError)
    check("weights must be one of 8, None, not 4", partial(start, weights=4), ValueError)
    check("error must be one of 'int8', 'float32', None, not 'bf16'", partial(start, error="bf16"), ValueError)
    check("block must be one of 64, 128, 256, 512, not 100", partial(start, block=100), ValueError)
    different = f"gradients is 8 on rank 0 and 4 on rank {transport.size - 1}: every rank needs the same settings"
    check(different, partial(start, 4 if transport.rank == transport.size - 1 else 8), ValueError)
    check("trainable parameters are not sharded", lambda: quantize(network()), ValueError)
    first = start()
    check("has a FSDPQuantizer already: close() it", start, ValueError)
    check("the state is not what state_dict()", lambda: first.load_state_dict({}), ValueError)
    state = first.state_dict()
    state["ranks"].pop("0.bias")
    check("the state has no error of 0.bias", lambda: first.load_state_dict(state), ValueError)
    exact = first.state_dict()
    first.close()
    second = start(error="float32")
    check("it was saved with another error= or number of ranks", lambda: second.load_state_dict(exact), ValueError)
    second.close()

    if transport.size % 2 == 0:
        square = init_device_mesh("cpu", (2, transport.size // 2), mesh_dim_names=("machine", "local"))
        hybrid = shard(network(), square)
        check("is sharded over a mesh of 2 dimensions", lambda: quantize(hybrid), ValueError)

    def step(change: Callable[[Any], Any], message: str, *kinds: type[Exception], model: Any = None) -> None:
        model = model or build(transport, "plain")
        quantizer = quantize(model, 8, 8)
        change(model)
        check(message, lambda: loss_of(model, batch).backward(), *kinds)
        quantizer.close()

    step(lambda m: m.set_gradient_divide_factor(1.5), "call set_force_sum_reduction_for_comms(True)", RuntimeError)
    step(lambda m: m[5].requires_grad_(False), "close() the quantizer and call it again", RuntimeError)
    mixed = network()
    mixed[0].bias.requires_grad_(False)
    mixed[0].bias.data = mixed[0].bias.data.half()
    mixed = shard(mixed, mesh_of(transport))
    step(lambda m: None, "are torch.uint8, not torch.float32", RuntimeError, model=mixed)

    half = shard(network(), mesh_of(transport), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    step(lambda m: None, "MixedPrecisionPolicy(reduce_dtype=torch.float32)", RuntimeError, model=half)

    def spoil(model: Any) -> None:
        with torch.no_grad():
            model[0].weight.to_local().fill_(float("inf"))

    step(
        spoil, "0.weight on rank 0 has NaN or inf, or is 2**64 or more: it cannot be trained further", RuntimeError
    )

    model, real = build(transport, "plain"), quantized.exchange_rows
    quantizer = quantize(model)

    def damage(arrived: Tensor, *arguments: Any) -> Any:
        works = real(arrived, *arguments)
        return [*works, Mock(wait=lambda: arrived[-1, -30:].bitwise_xor_(1))]

    with patch.object(quantized, "exchange_rows", damage):
        check(
            "with a wrong checksum: it changed in transit", lambda: loss_of(model, batch).backward(), PayloadError
        )
    model.reset_iter_state()
    loss_of(model, batch).backward()
    quantizer.close()
