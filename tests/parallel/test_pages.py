"""Commands and scripts of README.md, of pages and of benchmarks work as they stand there."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from documented import DOCS, code
from environment import REPOSITORY, patient
from parallel.processes import run_together
from parallel.ranks import mpirun, torchrun
from warm import python

from dgc.advisor.command import main
from scripts.launch import prepare

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
LINE = re.compile(r"step (\d+): loss ([\d.]+), sent ([\d.]+) of ([\d.]+) MB, residual ([\d.]+), dropped (\d+)")


def changed(framework: str) -> list[tuple[str, int]]:
    """The lines of each of the README's scripts after the change, and how many of them are new."""
    changes = [text.splitlines() for text in CHANGES if framework in text]
    return [
        ("\n".join(line[1:] for line in lines if line[:1] != "-"), sum(line[:1] == "+" for line in lines))
        for lines in changes
    ]


@pytest.mark.horovod
def test_the_readmes_change_to_a_horovod_script(tmp_path: Path) -> None:
    ((lines, _),) = changed("horovod")
    assert "DGCCompressor" in lines and "hvd.DistributedOptimizer" not in lines
    assert "import HorovodTransport" not in lines  # an import for its side effects counts as unused
    model = "\nmodel = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 10))\nepochs = 7\n"
    script = tmp_path / "script.py"
    start = next(line for line in lines.splitlines() if line.startswith("dgc.init()"))
    script.write_text("import torch\n" + lines.replace(start, start + model, 1) + BODY)
    done = mpirun(2, ["-W", "error", str(script)])
    assert done.returncode == 0 and "trained" in done.stdout, done.stdout + done.stderr


def test_the_readmes_changes_to_a_script_with_ddp(tmp_path: Path) -> None:
    (first, two), (second, three) = changed("DistributedDataParallel")
    assert "AdamW" in first and "bits=8" in first and "DGCSGD" in second
    script = tmp_path / "script.py"
    script.write_text(BEFORE_DDP + first + AFTER_DDP + second + AFTER_DDP)
    done = torchrun(2, [str(script)])
    assert done.returncode == 0 and done.stdout.count("trained") == 4, done.stdout + done.stderr
    assert (two, three) == (2, 3)


ONE_FILE = """
import hashlib
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dgc import TwoPhaseCompressor, compress

dist.init_process_group("gloo")
rank, start, last = dist.get_rank(), 0, int(sys.argv[2])
os.chdir(sys.argv[1])
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
exchange = compress(model, TwoPhaseCompressor(bits=4), optimizer)
if os.path.exists("checkpoint.pt"):
{load}
for step in range(start, last):
    inputs = torch.randn(8, 100, generator=torch.Generator().manual_seed(2 * step + rank))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
step = last
{save}
if rank == 0:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print("weights", start, hashlib.sha256(weights.numpy().tobytes()).hexdigest())
dist.destroy_process_group()
"""


def test_the_lines_for_one_file_on_rank_0_resume_with_the_same_bits(tmp_path: Path) -> None:
    save, load = code("checkpoints.md")[3:5]
    assert "gather_state" in save and "load_gathered" in load
    script = tmp_path / "script.py"
    script.write_text(ONE_FILE.format(load=indent(load, "    "), save=save))

    def weights(folder: str, last: int) -> tuple[str, str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        done = torchrun(2, [str(script), str(tmp_path / folder), str(last)])
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"weights (\d+) (\w+)", done.stdout)
        assert found is not None
        return found[1], found[2]

    weights("interrupted", 3)
    (begun, resumed), (_, whole) = weights("interrupted", 6), weights("whole", 6)
    assert begun == "3" and resumed == whole


@pytest.mark.timeout(300)
def test_the_script_of_the_recipe_does_what_the_page_says(tmp_path: Path) -> None:
    script, text = tmp_path / "train_gpt.py", tmp_path / "text.txt"
    for block in code("recipe.md"):  # the first line is the name of the file
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    text.write_text("".join(path.read_text() for path in sorted((REPOSITORY / "dgc/optim").glob("*.py"))))
    done = torchrun(2, ["-W", "error::UserWarning:dgc", str(script), str(text), "small", "50"])
    assert done.returncode == 0, done.stdout + done.stderr
    found = [tuple(map(float, numbers)) for numbers in LINE.findall(done.stdout)]
    assert [step for step, *_ in found] == [5.0 * (i + 1) for i in range(10)]
    assert found[-1][1] < found[0][1] - 0.5
    steps = zip([(0.0,) * 6, *found], found, strict=False)
    assert [round((b[2] - a[2]) / (b[3] - a[3]), 2) for a, b in steps] == [0.5] * 2 + [0.03] * 8
    assert [residual > 0 for *_, residual, _ in found] == [False] * 2 + [True] * 8
    assert len(LINE.findall((DOCS / "recipe.md").read_text())) == 10


def test_the_advisor_takes_the_model_of_the_recipe() -> None:
    names: dict[str, Any] = {}
    exec(code("recipe.md")[0], names)
    model, batch, loss = names["make"]("small")
    assert loss(model, batch).item() == pytest.approx(math.log(256), abs=0.1)
    with torch.device("meta"):
        assert sum(p.numel() for p in names["make"]()[0].parameters()) == pytest.approx(354e6, rel=1e-3)


def test_the_recipe_shows_what_the_advisor_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "recipe.md").read_text()
    command = re.search(r"python -m dgc\.advise (--parameters .*?)\n\n", page, re.S)
    assert command is not None and main(command[1].replace("\\\n", " ").split()) == 0
    printed = capsys.readouterr().out.partition("\nNot predicted")[0].splitlines()
    assert len(printed) == 29 and "".join(f"    {line}".rstrip() + "\n" for line in printed) in page


@pytest.mark.proof
@pytest.mark.horovod
def test_the_commands_of_extending_work_in_another_folder(tmp_path: Path) -> None:
    my = tmp_path / "my"
    my.mkdir()
    for block in code("extending.md"):
        name = re.match(r"# ~/my/(\w+\.py)\n", block)
        assert name, block
        (my / name[1]).write_text(block)
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / "extending.md").read_text(), re.S)
    command = ["bash", "-euxc", "".join(blocks).replace("~/my", shlex.quote(str(my)))]
    _, environment = prepare(2, [])
    environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(python()).parent}:{environment['PATH']}"}
    environment["PYTHONPATH"] = f"{REPOSITORY}:{environment.get('PYTHONPATH', '')}"
    options: Any = {"cwd": REPOSITORY, "env": environment, "timeout": patient(380)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    assert re.findall(r"(\d+) passed", done.stdout) == ["21"]
    ends = {run.name: json.loads((run / "summary.json").read_text()) for run in (my / "runs").iterdir()}
    ranks = {name: end["ranks"] for name, end in ends.items()}
    assert ranks == {"experiment": 1, "ternary": 2, "share": 1, "chords": 2, "smoothed": 1}
    for run in ("experiment", "share", "chords"):
        assert ends[run]["metric"] == "recall/test_malignant" and ends[run]["best"]["recall/test_malignant"] > 80
        assert ends[run]["final"]["acc/test_top1"] > 90, (run, ends[run])
    assert ends["ternary"]["final"]["acc/test_top1"] > 50 and ends["ternary"]["wire_over_dense"] < 0.2


HERE = {
    "consensus": "--ranks 4",
    "convergence": "--simulate --ranks 2 --folds 1 --epochs 1 --batch-size 90 --methods dense fp16",
    "decoding": "--ranks 2 --formats sign-rice --rounds 1",
    "methods": "--elements 0.1 --tensors 3 --ranks 2 --methods scaled-sign dgc powersgd-1 fp16 --rounds 1",
    "payload_bytes": "--values sign --indices rice",
    "scale": "--model resnet18 --methods fp16 --ranks 2 4 --work 0.1",
    "selectors": "--models resnet20 --fit-models resnet20 --steps 2 --settle 1 --rounds 1",
    "step_overhead": "--rounds 1 --warm-up 1",
    "wire": "--steps 5 --densities 0.01",
    # over Gloo
    "ddp_step": "--ranks 2 --factors 1 --rounds 1 --warmup 3",
    "groups": "--rounds 1 --every 2 --layers 1 --batch 1 --join-after 4",
    "muon_step": "--ranks 2 --width 16 --rounds 1",
    "outer_speed": "--launcher torchrun --steps 1 --every 2 --delay 0 --batch 1 --methods fp16 diloco",
    "sixteen_bits": "--ranks 2 --repeats 1 --warmup 0",
    "step_cost": "--ranks 1 --over gloo --sizes mlp --rounds 1 --warmup 2",
    "train_step": "--ranks 2 --model lm --batch 1 --repeats 1 --methods fsdp-noop fsdp-bf16-rows 4-8@fsdp",
    "weight_differences": "--ranks 2 --layers 1 --repeats 1 --warmup 0",
}
UNDER_MPIRUN = {
    "exchange": "--ranks 2 --model resnet18 --warmup 1 --repeats 1 --methods noop dgc sgp horovod",
    "step_cost": "--ranks 1 --over horovod --sizes mlp --rounds 1 --warmup 2",
    "straggler": "--ranks 2 --compute 1 --numel 100 --repeats 2 --warmup 1 --methods ar sgp",
    "train_step": "--ranks 2 --model resnet18 --image 32 --batch 2 --repeats 1 --methods noop dgc ddp-fp16",
}
COMMANDS_OF_HOROVOD = [pytest.param(*row, marks=pytest.mark.horovod) for row in UNDER_MPIRUN.items()]


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "words"), [*HERE.items(), *COMMANDS_OF_HOROVOD])
def test_the_smallest_run(name: str, words: str) -> None:
    module, *options = name.split()
    given = [word.replace("sign-rice", "sign rice") for word in words.split()]
    command = [sys.executable, "-m", f"benchmarks.{module}", *options, *given]
    (done,) = run_together([command], REPOSITORY, os.environ, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert json.loads(last)["benchmark"] == module and len(lines) >= 3, done.stdout
