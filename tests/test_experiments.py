"""The shipped experiments: hyper-parameters, what follows what, and the original README's commands, run."""

import json
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import table
from parallel.processes import run_together
from small_data import write_cifar, write_imagenet
from warm import python

from dgc.core.momentum import MomentumCorrection
from dgc_training.config import instantiate, load
from dgc_training.config_files import REPOSITORY
from dgc_training.constructors import import_target
from dgc_training.schedule import Schedule, scale_learning_rate
from dgc_training.startup.run_name import run_name
from scripts.launch import environment

EXPERIMENTS = {row[0].split("`")[1]: row for row in table("config")}
MPIRUN = """mpirun -np 2 -H localhost:2 -bind-to none -map-by slot -x NCCL_DEBUG=INFO -x LD_LIBRARY_PATH -x PATH \\
    -mca pml ob1 -mca btl ^openib -mca btl_tcp_if_exclude docker0,lo \\
    python train.py --configs configs/imagenet/resnet50.py configs/dgc/wm0.py"""
CIFAR = """horovodrun -np 8 python train.py --configs configs/cifar/resnet20.py \\
    configs/dgc/wm5.py configs/dgc/fp16.py configs/dgc/int32.py"""
LONGER = """horovodrun -np 8 python train.py --configs configs/cifar/resnet20.py \\
    configs/dgc/wm5.py --configs.train.num_epochs 500 --suffix .e500"""
ONE = "python train.py --configs configs/cifar/resnet110.py --configs.train.batch_size 20 --suffix .b20"
# one short epoch each, and images and classes as few as the small data has
SHORT = " --configs.train.num_epochs 1"
SMALL = " --configs.dataset.num_classes 4 --configs.dataset.image_size 32 --configs.train.batch_size 4"


@pytest.mark.parametrize("name", sorted(EXPERIMENTS.keys() - {"configs/imagenet/cosine"}))
def test_the_documented_experiments(name: str) -> None:
    row, tree = EXPERIMENTS[name], load([name])
    train = tree.train
    found = [train.num_epochs, train.batch_size, train.optimizer.lr, train.optimizer.weight_decay]
    assert [float(cell) for cell in row[2:6]] == found
    with torch.device("meta"):
        model = instantiate(tree.model)
    assert sum(p.numel() for p in model.parameters()) == int(row[1].replace(",", ""))
    cosine = train.scheduler._target_.endswith("CosineAnnealingLR")
    assert ("cosine" if cosine else "a tenth at 30, 60, 80") == row[6]
    if cosine:
        assert train.scheduler.T_max == train.num_epochs - 5
    else:
        assert list(train.scheduler.milestones) == [25, 55, 75] and train.scheduler.gamma == 0.1
    assert (train.optimizer.momentum, train.warmup_lr_epochs, train.schedule_lr_per_epoch) == (0.9, 5, True)


def test_every_experiment_is_documented() -> None:
    files = {str(file.relative_to(REPOSITORY).with_suffix("")) for file in REPOSITORY.glob("configs/*/*.py")}
    folders = ("digits", "cifar", "imagenet")
    files = {name for name in files if name.split("/")[1] in folders and not name.endswith("__init__")}
    assert files == set(EXPERIMENTS)


def test_the_documented_run_directories_are_those_of_their_commands() -> None:
    size, stack = 8, ""
    for words, directory in table("command line"):
        stack = words = words.strip("`").replace("the same `...", stack)
        if match := re.search(r"-np (\d+)", words):
            size = int(match[1])
        names, suffix = re.findall(r"configs/\S+\.py", words), re.search(r"--suffix (\S+)", words)
        assert directory == f"`runs/{run_name(names, suffix[1] if suffix else '', size)}`"


def test_what_only_the_resnets_for_imagenet_have() -> None:
    tree = load(["configs/imagenet/resnet50", "configs/dgc/wm0"])
    assert tree.train.optimizer.nesterov is tree.train.compression.memory.nesterov is True
    assert tree.train.optimize_bn_separately is True
    for name in ("resnet18", "vgg16_bn"):
        train = load([f"configs/imagenet/{name}"]).train
        assert "nesterov" not in train.optimizer and train.optimize_bn_separately is False
    model = instantiate(load(["configs/imagenet/resnet18"]).model)
    assert all(torch.all(block.bn2.weight == 0) for layer in (model.layer1, model.layer4) for block in layer)
    # any model of torchvision goes by its import path
    larger = import_target("torchvision.models.resnet101")
    tree = load(["configs/imagenet/resnet50"], ["--configs.model._target_", "torchvision.models.resnet101"])
    with torch.device("meta"):
        assert type(instantiate(tree.model)) is type(larger())


def test_what_is_derived_follows_the_command_line() -> None:
    tree = load(["configs/cifar/resnet56"], ["--configs.dataset.num_classes", "100"])
    assert (tree.model.num_classes, tree.dataset.root) == (100, "data/cifar100")
    words = ["--configs.train.warmup_lr_epochs", "0", "--configs.dataset.num_classes", "10"]
    tree = load(["configs/imagenet/vgg16_bn"], words)
    assert list(tree.train.scheduler.milestones) == [30, 60, 80] and tree.model.num_classes == 10
    words = ["--configs.train.num_epochs", "300", "--configs.train.optimizer.momentum", "0.8"]
    tree = load(["configs/imagenet/resnet50", "configs/imagenet/cosine", "configs/dgc/wm0"], words)
    assert tree.train.scheduler.T_max == 295 and tree.train.compression.memory.momentum == 0.8
    tree = load(["configs/cifar/resnet20", "configs/dgc/wm5"], ["--configs.train.num_epochs", "500"])
    assert tree.train.scheduler.T_max == 495
    # chunks take the experiment's momentum and warm-up
    for warm_up, ratios in (("wm0", [0.1]), ("wm5", [0.1 ** (e / 5) for e in range(1, 6)]), ("wm5o", [1.0] * 5)):
        tree = load(["configs/imagenet/resnet50", f"configs/chunks/{warm_up}", "configs/chunks/fp32"])
        compression = instantiate(tree.train.compression)
        assert compression.correction == MomentumCorrection(0.9, nesterov=True)
        assert (compression.chunk_size, compression.cast.dtype) == (32768, "fp32")
        for epoch, ratio in enumerate([*ratios, 0.1]):
            assert compression.in_epoch(epoch).compress_ratio == pytest.approx(ratio)


def test_learning_rates_of_an_imagenet_run_on_8_ranks() -> None:
    cosine = {5: 0.1, 47: 0.1 * (1 + math.cos(math.pi * 42 / 85)) / 2}
    steps = {0: 0.0125, 4: 0.0825, 5: 0.1, 29: 0.1, 30: 0.01, 59: 0.01, 60: 1e-3, 80: 1e-4, 89: 1e-4}
    for files, expected in ((["resnet50"], steps), (["resnet50", "cosine"], cosine)):
        train = load([f"configs/imagenet/{name}" for name in files]).train
        optimizer = instantiate(train.optimizer, [torch.zeros(1, requires_grad=True)])
        scale_learning_rate(optimizer, 8)
        make = partial(instantiate, train.scheduler)
        schedule = Schedule(optimizer, make, size=8, steps_per_epoch=1, warmup_epochs=train.warmup_lr_epochs)
        rates = []
        for epoch in range(train.num_epochs):
            schedule.begin_step(epoch, 0)
            rates.append(schedule.rates()[0])
            optimizer.step()
        assert {epoch: rates[epoch] for epoch in expected} == pytest.approx(expected) and min(rates[:80]) > 0


# The original README's commands, in a folder that has train.py and small data in the default places


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").symlink_to(REPOSITORY / "train.py")
    write_cifar(tmp_path / "data/cifar10")
    write_imagenet(tmp_path / "data/imagenet")
    return tmp_path


def run(command: str, folder: Path, timeout: float = 110) -> Any:
    ranks = int((re.search(r"-np (\d+)", command) or ["", "1"])[1])
    env = environment(ranks, len(os.sched_getaffinity(0)), os.geteuid() == 0, os.environ)
    env |= {"OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(python()).parent}:{env['PATH']}"
    (done,) = run_together([["bash", "-c", command]], folder, env, timeout)
    return done


def trained(done: Any, directory: Path) -> Any:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((directory / "summary.json").read_text())


@pytest.mark.horovod
@pytest.mark.timeout(300)
def test_horovodrun_on_cifar(folder: Any) -> None:
    command = CIFAR.replace("-np 8", "-np 2") + SHORT
    summary = trained(run(command, folder), folder / "runs/[cifar.resnet20+dgc.[wm5+fp16+int32]].np2")
    assert summary["ranks"] == 2 and summary["samples"] == 40
    assert 1 / 3 < summary["wire_over_dense"] < 1 / 1.5, "25 % of the elements, 6 bytes each in place of 4"


@pytest.mark.horovod
@pytest.mark.timeout(300)
def test_mpirun_on_imagenet(folder: Any) -> None:
    command = MPIRUN.replace("resnet50", "resnet18") + SHORT + SMALL + " --configs.data.num_workers 0"
    summary = trained(run(command, folder), folder / "runs/[imagenet.resnet18+dgc.wm0].np2")
    assert summary["ranks"] == 2 and summary["samples"] == 24 and 0 < summary["wire_over_dense"] < 0.01


@pytest.mark.horovod
@pytest.mark.timeout(300)
def test_absent_data_is_one_message_of_all_ranks(folder: Any) -> None:
    """Without a traceback, and nothing is left behind."""
    command = CIFAR.replace("horovodrun -np 8", "mpirun -np 2 -H localhost:2")
    done = run(command + " --configs.dataset.root nowhere --suffix .absent", folder)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    first = next(line for line in done.stderr.splitlines() if "dataset" in line)
    # rank 0 prints it at once, the others after a delay; on a machine with other work one of them may be first
    reason = r"dataset \(dgc_datasets.CIFAR\): the data set is not there: nowhere/cifar-10-batches-py"
    assert re.match(rf"(\[rank 1 of 2 on \S+\] )?{reason}", first), first
    assert not list((folder / "runs").glob("*")) and not (folder / "nowhere").exists()


@pytest.mark.horovod
@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_the_original_readmes_commands(folder: Any) -> None:
    """As written, but for fewer epochs, and the 32 ranks of four machines as 2 of this one."""
    for command, name, key, value in (
        (CIFAR, "[cifar.resnet20+dgc.[wm5+fp16+int32]].np8", "ranks", 8),
        # with the 4 workers per rank that decode images
        (MPIRUN + SMALL, "[imagenet.resnet50+dgc.wm0].np2", "samples", 24),
        (ONE, "cifar.resnet110.b20.np1", "samples", 40),
        (LONGER, "[cifar.resnet20+dgc.wm5].e500.np8", "ranks", 8),
    ):
        assert trained(run(command + SHORT, folder, 300), folder / "runs" / name)[key] == value
