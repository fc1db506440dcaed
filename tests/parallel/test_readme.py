"""The README's change to a Horovod script, made and run as it stands there."""

from pathlib import Path

import pytest
from environment import REPOSITORY
from parallel.ranks import mpirun

BODY = """
    optimizer.zero_grad()
    model(torch.randn(8, 100)).square().mean().backward()
    optimizer.step()
total = hvd.allgather(torch.stack([p.detach().double().sum() for p in model.parameters()]).sum().view(1))
assert (total == total[0]).all() and hvd.size() == 2, total
print("trained")
"""


@pytest.mark.horovod
def test_the_change_to_a_horovod_script(tmp_path: Path) -> None:
    text = (REPOSITORY / "README.md").read_text()
    lines = text.split("```diff\n")[1].split("```")[0].splitlines()
    changed = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    assert "DGCCompressor" in changed and "hvd.DistributedOptimizer" not in changed
    assert "import HorovodTransport" not in changed  # an import for its side effects counts as unused
    model = "\nmodel = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 10))\nepochs = 7\n"
    script = tmp_path / "script.py"
    start = next(line for line in changed.splitlines() if line.startswith("dgc.init()"))
    script.write_text("import torch\n" + changed.replace(start, start + model, 1) + BODY)
    done = mpirun(2, ["-W", "error", str(script)])
    assert done.returncode == 0 and "trained" in done.stdout, done.stdout + done.stderr
