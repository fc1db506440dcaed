"""The launch scripts: what they start, and what they refuse. None of them starts anything here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from documented import table

from training.config import load
from training.config.files import REPOSITORY

ROWS = sorted((REPOSITORY / "scripts/imagenet").glob("batch*.sh"))
LAUNCHERS = [REPOSITORY / f"scripts/{name}.sh" for name in ("common", "horovodrun", "mpirun", "slurm")]
SHELL = [*LAUNCHERS, *REPOSITORY.glob("scripts/imagenet/*.sh")]


def shell(script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("HOSTS", "RANKS", "MPI_OPTIONS")}
    env = {**clean, "DRY_RUN": "1", **variables}
    return subprocess.run(["bash", str(script), *words], env=env, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("script", SHELL, ids=lambda script: script.name)
def test_shell(script):
    checks = [["bash", "-n", str(script)]]
    if found := shutil.which("shellcheck"):
        checks.append([found, "-x", "-P", str(REPOSITORY), str(script)])
    for check in checks:
        done = subprocess.run(check, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", ROWS, ids=lambda script: script.stem)
def test_a_row_of_the_accuracy_table(script):
    row = next(row for row in table("script in") if row[0] == f"`{script.name}`")
    title = script.read_text().splitlines()[1]
    assert f"ResNet-50 {row[4]}, VGG-16-BN {row[5]}." in title
    done = shell(script, "vgg16_bn", "--configs.seed", "3")
    words = done.stdout.split()
    assert words[0].endswith("mpirun") and words[-2:] == ["--configs.seed", "3"], done.stderr
    ranks = int(words[words.index("-np") + 1])
    files = [word for word in words if word.startswith("configs/")]
    passes = [int(b) for a, b in zip(words, words[1:], strict=False) if a.endswith("num_batches_per_step")]
    tree = load(files, [f"--configs.train.num_batches_per_step={n}" for n in passes])
    batch = ranks * tree.train.num_batches_per_step * tree.train.batch_size
    dense = script.name == "batch256-dense.sh"
    assert [batch, ranks * tree.train.num_batches_per_step, ranks] == (
        [256, 8, 8] if dense else [int(row[2]), int(row[1]), int(row[3])]
    )
    assert f"batch{batch}" in script.name and tree.train.dgc is not dense
    cosine = tree.train.scheduler._target_.endswith("CosineAnnealingLR")
    assert cosine is (row[6] == "cosine") and str(tree.model._target_) == "torchvision.models.vgg16_bn"
    rate = tree.train.optimizer.lr * tree.train.num_batches_per_step * ranks
    assert rate == pytest.approx(0.1 * batch / 256)


def test_every_row_has_a_script():
    assert {row[0].strip("`") for row in table("script in")} == {script.name for script in ROWS}


@pytest.mark.parametrize(
    ("script", "variables", "words", "complaint"),
    [
        ("mpirun", {}, ["--configs", "x"], "how many ranks"),
        ("mpirun", {"RANKS": "2"}, [], "no words for train.py"),
        ("mpirun", {"RANKS": "two"}, ["--configs", "x"], "RANKS is two"),
        ("horovodrun", {"HOSTS": "a:x"}, ["--configs", "x"], "HOSTS is a:x"),
        ("horovodrun", {"HOSTS": "a:2,b", "RANKS": "4"}, ["--configs", "x"], "HOSTS has 3 places"),
        ("imagenet/batch256", {}, [], "which model"),
        ("imagenet/batch256", {"HOSTS": "a:4"}, ["resnet50"], "HOSTS has 4 places, but 8 ranks"),
        ("imagenet/batch256", {"LAUNCH": "torchrun"}, ["resnet50"], "LAUNCH is torchrun"),
        ("slurm", {}, ["--configs", "x"], "no SLURM job"),
    ],
)
def test_launchers_say_what_is_wrong(script, variables, words, complaint):
    done = shell(REPOSITORY / f"scripts/{script}.sh", *words, **variables)
    assert done.returncode == 2 and complaint in done.stderr and not done.stdout


def test_hosts():
    options = {"HOSTS": "server0:8,server1:8", "MPI_OPTIONS": "-mca btl_tcp_if_include eth1", "NCCL_DEBUG": "INFO"}
    line = shell(REPOSITORY / "scripts/mpirun.sh", "--configs", "a b.py", **options).stdout.replace("\\", "")
    assert "mpirun -np 16 -H server0:8,server1:8 -bind-to none -map-by slot" in line
    assert "-x NCCL_DEBUG -mca pml ob1 -mca btl ^openib -mca btl_tcp_if_exclude docker0,lo" in line
    assert line.split("docker0,lo ")[1].startswith("-mca btl_tcp_if_include eth1 python /")
    assert line.endswith("/train.py --configs a b.py \n")
    line = shell(REPOSITORY / "scripts/horovodrun.sh", "--configs", "a.py", **options).stdout.replace("\\", "")
    assert line.startswith("horovodrun -np 16 -H server0:8,server1:8 --mpi-args -mca btl_tcp_if_include eth1 ")


@pytest.mark.parametrize("words", [["--configs", "a.py"], ["scripts/imagenet/batch256.sh", "resnet50"]])
def test_slurm(tmp_path, words):
    """SLURM runs a copy of the script elsewhere; its scontrol lists the machines."""
    control = tmp_path / "scontrol"
    control.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"\n')
    control.chmod(0o755)
    copy = shutil.copy(REPOSITORY / "scripts/slurm.sh", tmp_path / "job")
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_NTASKS": "8",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
    }
    done = shell(Path(copy), *words, **job)
    assert "mpirun -np 8 -H node3:4\\,node4:4 " in done.stdout, done.stderr
    wrong = shell(Path(copy), *words, **{**job, "SLURM_SUBMIT_DIR": str(tmp_path)})
    assert wrong.returncode == 2 and "repository's root" in wrong.stderr
