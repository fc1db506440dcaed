"""The README's changes to a script for Horovod and to one for DDP, made and run as they stand there."""

from pathlib import Path

import pytest
from environment import REPOSITORY
from parallel.ranks import mpirun, torchrun

CHANGES = [block.split("```")[0] for block in (REPOSITORY / "README.md").read_text().split("```diff\n")[1:]]

BODY = """
    optimizer.zero_grad()
    model(torch.randn(8, 100)).square().mean().backward()
    optimizer.step()
total = hvd.allgather(torch.stack([p.detach().double().sum() for p in model.parameters()]).sum().view(1))
assert (total == total[0]).all() and hvd.size() == 2, total
print("trained")
"""

BEFORE_DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 10))
loader = [torch.randn(8, 100) for _ in range(2)]
"""
AFTER_DDP = """
for inputs in 6 * loader:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
totals = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
dist.all_gather(totals, torch.stack([p.detach().double().sum() for p in net.parameters()]).sum().view(1))
assert totals[0] == totals[1] and exchange.meter.wire_bytes < exchange.meter.dense_wire_bytes, totals
print("trained")
"""


def changed(framework: str) -> str:
    """The lines of the script after the change."""
    (change,) = [text for text in CHANGES if framework in text]
    return "\n".join(line[1:] for line in change.splitlines() if not line.startswith("-"))


@pytest.mark.horovod
def test_the_change_to_a_horovod_script(tmp_path: Path) -> None:
    lines = changed("horovod")
    assert "DGCCompressor" in lines and "hvd.DistributedOptimizer" not in lines
    assert "import HorovodTransport" not in lines  # an import for its side effects counts as unused
    model = "\nmodel = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 10))\nepochs = 7\n"
    script = tmp_path / "script.py"
    start = next(line for line in lines.splitlines() if line.startswith("dgc.init()"))
    script.write_text("import torch\n" + lines.replace(start, start + model, 1) + BODY)
    done = mpirun(2, ["-W", "error", str(script)])
    assert done.returncode == 0 and "trained" in done.stdout, done.stdout + done.stderr


def test_the_change_to_a_script_with_ddp_is_of_three_lines(tmp_path: Path) -> None:
    (change,) = [text for text in CHANGES if "DistributedDataParallel" in text]
    assert sum(line.startswith("+") for line in change.splitlines()) == 3
    script = tmp_path / "script.py"
    script.write_text(BEFORE_DDP + changed("DistributedDataParallel") + AFTER_DDP)
    done = torchrun(2, [str(script)])
    assert done.returncode == 0 and done.stdout.count("trained") == 2, done.stdout + done.stderr
