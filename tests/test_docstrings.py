"""The example of every docstring runs, on one simulated rank, and prints what the docstring says.

So do the lines to copy of docs/methods.md.
"""

import ast
import doctest
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist
from channels import ChannelWorld
from documented import code
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgc
from dgc.comm.collectives import all_reduce
from dgc.comm.connect import choose_transport
from dgc.comm.lockstep import LockstepWorld
from dgc.ddp import compress
from dgc.gossip.model import FlatModel
from dgc.gossip.topology import peer_schedule
from dgc.testing import check_compressor

DGC = Path(dgc.__path__[0])
PACKAGES = "comm compression gossip launch local memory optim selection wire".split()


def examples() -> dict[str, tuple[str, str]]:
    """(code, file) of each docstring's example, by the name of its class or function, and of the page's blocks."""
    found = {f"methods.md {number}": (block, "methods.md") for number, block in enumerate(code("methods.md"))}
    assert len(found) > 30
    # the examples of dgc.integrations need the trainers of others: examples/ and tests/integrations run them
    for file in sorted({*DGC.rglob("*.py")} - {*DGC.rglob("integrations/*.py")}):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            text = ast.get_docstring(node) or ""
            if "\nExample:\n" in text:
                block = text.split("\nExample:\n")[1].split("\n\n")[0]
                found[f"{file.relative_to(DGC)} {node.name}"] = (dedent(block), str(file))
    return found


def one_rank() -> Any:
    transport: Any = LockstepWorld(1).transports[0]
    transport.channel = lambda: ChannelWorld(1).channels[0]
    return transport


def names() -> dict[str, Any]:
    """What an example may use: public names, and the objects of a training script."""
    packages = [import_module(f"dgc.{name}") for name in PACKAGES]
    public = {name: value for package in packages for name, value in vars(package).items() if name[0] != "_"}
    public |= {"DistributedDataParallel": DistributedDataParallel, "compress": compress, "FlatModel": FlatModel}
    public |= {"LockstepWorld": LockstepWorld, "all_reduce": all_reduce, "choose_transport": choose_transport}
    public |= {"peer_schedule": peer_schedule, "check_compressor": check_compressor}
    model = nn.Linear(32, 16)
    return public | {
        "torch": torch,
        "dgc": dgc,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "transport": one_rank(),
        "connect": lambda **options: one_rank(),
        "x": torch.ones(3),
        "inputs": torch.ones(4, 32),
        "targets": torch.zeros(4, dtype=torch.int64),
        "loss_fn": lambda outputs, *targets: outputs.square().mean(),
    }


@pytest.mark.filterwarnings("ignore")  # one rank has nobody to exchange with
def test_examples_run(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for module in ("distributed", "local"):
        monkeypatch.setattr(f"dgc.optim.{module}.default_transport", lambda **options: one_rank())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    found = examples()
    assert len(found) > 80
    failed: list[str] = []
    for name, (text, file) in found.items():
        namespace = names()
        if ">>>" in text:
            test = doctest.DocTestParser().get_doctest(text, namespace, name, file, 0)
            doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=failed.append)
            continue
        try:
            exec(text, namespace)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}\n{text}")
    assert not failed, "\n".join(failed)
