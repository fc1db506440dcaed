"""The launch scripts: their commands and errors."""

import os
import shutil
import socket
import subprocess
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from documented import table
from environment import patient

from dgc_training.config import load
from dgc_training.config_files import REPOSITORY
from scripts.launch import environment, mpirun

ROWS = sorted((REPOSITORY / "scripts/imagenet").glob("batch*.sh"))
SCRIPTS = [REPOSITORY / f"scripts/{name}.sh" for name in ("common", "horovodrun", "mpirun", "slurm", "torchrun")]
SHELL = [*SCRIPTS, *REPOSITORY.glob("scripts/imagenet/*.sh"), *REPOSITORY.glob("scripts/gossip/*.sh")]
OURS = ("HOSTS", "RANKS", "MPI_OPTIONS", "NETWORK", "INTERFACE", "TOPOLOGY", "EXPERIMENT", "LAUNCH", "REQUEUE")
ELASTIC = ("ELASTIC", "MAX_MACHINES", "MIN_MACHINES", "RENDEZVOUS", "RESTARTS", "RUN_ID", "RDZV_CONF")
GOSSIP = {"ar": None, **dict.fromkeys(("sgp", "osgp"), "n_peer_exponential")}
GOSSIP |= dict.fromkeys(("dpsgd", "adpsgd"), "bipartite_exponential")
TRAIN = ["--configs", "x"]
EXCLUDING = {"MPI_OPTIONS": "-mca btl_tcp_if_exclude lo"}


def shell(script: Path | str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A dry run of a script of scripts/."""
    foreign = ("SLURM_", "NCCL_", "UCX_", "HOROVOD_")
    clean = {k: v for k, v in os.environ.items() if k not in OURS + ELASTIC and not k.startswith(foreign)}
    command = ["bash", str(REPOSITORY / f"scripts/{script}.sh" if isinstance(script, str) else script), *words]
    env = {**clean, "DRY_RUN": "1", **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=patient(60))


def line_of(script: str, *words: str, **variables: str) -> str:
    """The command that a script would run, without quotes."""
    return shell(script, *words, **variables).stdout.replace("\\", "")


def test_shell() -> None:
    checks = [["bash", "-n"], ["shellcheck", "-x", "-P", str(REPOSITORY)]]
    for check, script in product([words for words in checks if shutil.which(words[0])], SHELL):
        done = subprocess.run([*check, str(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", ROWS, ids=lambda script: script.stem)
def test_a_row_of_the_accuracy_table(script: Any) -> None:
    row = next(row for row in table("script in") if row[0] == f"`{script.name}`")
    title = script.read_text().splitlines()[1]
    assert f"ResNet-50 {row[4]}, VGG-16-BN {row[5]}." in title
    done = shell(script, "vgg16_bn", "--configs.seed", "3")
    words = done.stdout.split()
    assert words[0].endswith("mpirun") and words[-2:] == ["--configs.seed", "3"], done.stderr
    ranks = int(words[words.index("-np") + 1])
    files = [word for word in words if word.startswith("configs/")]
    passes = [int(b) for a, b in pairwise(words) if a.endswith("num_batches_per_step")]
    tree = load(files, [f"--configs.train.num_batches_per_step={n}" for n in passes])
    batch = ranks * tree.train.num_batches_per_step * tree.train.batch_size
    dense = script.name == "batch256-dense.sh"
    expected = [256, 8, 8] if dense else [int(row[2]), int(row[1]), int(row[3])]
    assert [batch, ranks * tree.train.num_batches_per_step, ranks] == expected
    assert f"batch{batch}" in script.name and tree.train.dgc is not dense
    cosine = tree.train.scheduler._target_.endswith("CosineAnnealingLR")
    assert cosine is (row[6] == "cosine") and str(tree.model._target_) == "torchvision.models.vgg16_bn"
    rate = tree.train.optimizer.lr * tree.train.num_batches_per_step * ranks
    assert rate == pytest.approx(0.1 * batch / 256)
    assert {row[0].strip("`") for row in table("script in")} == {script.name for script in ROWS}


def test_errors_of_launchers() -> None:
    cases: list[tuple[str, dict[str, str], list[str], str]] = [
        ("mpirun", {}, TRAIN, "set the number of ranks"),
        ("mpirun", {"RANKS": "2"}, [], "no arguments for train.py"),
        ("mpirun", {"RANKS": "two"}, TRAIN, "RANKS is two"),
        ("horovodrun", {"HOSTS": "a:x"}, TRAIN, "HOSTS is a:x"),
        ("horovodrun", {"HOSTS": "a:2,b", "RANKS": "4"}, TRAIN, "HOSTS has 3 slots"),
        ("imagenet/batch256", {}, [], "must be a model"),
        ("imagenet/batch256", {"HOSTS": "a:4"}, ["resnet50"], "HOSTS has 4 slots, but RANKS is 8"),
        ("imagenet/batch256", {"LAUNCH": "torchrun"}, ["resnet50"], "LAUNCH is torchrun"),
        ("slurm", {"DRY_RUN": ""}, TRAIN, "not a SLURM job"),
        ("mpirun", {"RANKS": "2", "NETWORK": "wifi"}, TRAIN, "NETWORK is wifi"),
        ("mpirun", {"RANKS": "2", "INTERFACE": "10.0.0.0/8"}, TRAIN, "INTERFACE is 10.0.0.0/8"),
        ("mpirun", {"RANKS": "2", "INTERFACE": "eth1", **EXCLUDING}, TRAIN, "both set the interface"),
        ("gossip/ar", {"RANKS": "2", "TOPOLOGY": "ring"}, [], "TOPOLOGY is ring, but ar"),
        ("gossip/sgp", {"RANKS": "2", "LAUNCH": "torchrun"}, [], "LAUNCH is torchrun"),
        ("gossip/sgp", {}, [], "set the number of ranks"),
        ("torchrun", {}, TRAIN, "set the number of ranks"),
        ("torchrun", {"RANKS": "2"}, [], "no arguments for train.py"),
        ("torchrun", {"HOSTS": "nowhere:2"}, TRAIN, "set RANKS, its number of ranks"),
        ("torchrun", {"RANKS": "2", "MIN_MACHINES": "3"}, TRAIN, "more than MAX_MACHINES, 1"),
        ("torchrun", {"RANKS": "2", "RENDEZVOUS": "a"}, TRAIN, "RENDEZVOUS is a"),
        ("torchrun", {"RANKS": "2", "RESTARTS": "0"}, TRAIN, "RESTARTS is 0"),
    ]
    unknown, interface = {"HOSTS": "localhost:1,nowhere.invalid:1"}, {"RANKS": "1", "INTERFACE": "lo,eth99"}
    for script in ("mpirun", "horovodrun"):
        for variables, message in (
            (unknown, "HOSTS has nowhere.invalid, but this name has no address"),
            (interface, "there is no interface eth99 (INTERFACE); this machine has: "),
        ):
            cases.append((script, {**variables, "DRY_RUN": ""}, TRAIN, f"{script}.sh: {message}"))
    for script, variables, words, message in cases:
        done = shell(script, *words, **variables)
        assert done.returncode == 2 and message in done.stderr and not done.stdout, (script, variables, words)


def test_torchrun() -> None:
    alone = line_of("torchrun", *TRAIN, RANKS="2")
    assert "agent.py --nproc-per-node 2 --max-restarts 10 --standalone " in alone
    host = socket.gethostname()
    several = line_of("torchrun", *TRAIN, HOSTS=f"server0:8,{host}:3", MIN_MACHINES="2", RDZV_CONF="a=1")
    assert "--nproc-per-node 3 --max-restarts 10 --nnodes 2:2 " in several
    assert "--rdzv-endpoint server0:29400 --rdzv-id dgc " in several
    assert "last_call_timeout=30,read_timeout=30,a=1 " in several
    assert "MIN_MACHINES" in shell("torchrun", "--help").stdout


def test_hosts() -> None:
    """An interface of MPI_OPTIONS replaces the list of excluded ones: Open MPI accepts only one of both lists."""
    hosts = "server0:8,server1:8"
    options = {"HOSTS": hosts, "MPI_OPTIONS": "-mca btl_tcp_if_include eth1", "NCCL_DEBUG": "INFO"}
    line = line_of("mpirun", "--configs", "a b.py", **options)
    assert f"mpirun -np 16 -H {hosts} -bind-to none -map-by slot" in line
    assert "-x NCCL_DEBUG -mca pml ob1 -mca btl ^openib -mca btl_tcp_if_include eth1 python /" in line
    assert line.endswith("/train.py --configs a b.py \n") and "exclude" not in line
    line = line_of("mpirun", *TRAIN, HOSTS=hosts)
    assert "-mca pml ob1 -mca btl ^openib -mca btl_tcp_if_exclude docker0,lo python /" in line
    given = "-mca orte_tag_output 0 -mca btl_tcp_if_include eth1 "
    assert line_of("horovodrun", *TRAIN, **options).startswith(f"horovodrun -np 16 -H {hosts} --mpi-args={given}")
    assert "mpirun -np 16 -H" in line_of("mpirun", *TRAIN, HOSTS="server0:08,server1:8")
    line = line_of("horovodrun", *TRAIN, RANKS="2", INTERFACE="eth1", NETWORK="ethernet")
    own = "--network-interfaces eth1 --mpi-args=-mca orte_tag_output 0 "  # it sets the interface itself
    assert line.startswith(f"horovodrun -np 2 -H localhost:2 {own}")


OB1, TCP, IF = "-mca pml ob1", "-mca btl tcp,self,vader", "-mca btl_tcp_if"
NCCL, GLOO = "-x NCCL_SOCKET_IFNAME", "-x HOROVOD_GLOO_IFACE"


def test_network(tmp_path: Path) -> None:
    """HAS: the message layer that the fake ompi_info prints."""
    cases = {
        "NETWORK=ethernet": f"-x NCCL_IB_DISABLE=1 {OB1} {TCP} {IF}_exclude docker0,lo python",
        "INTERFACE=eth1": f"{NCCL}=eth1 {GLOO}=eth1 {OB1} {TCP} {IF}_include eth1 python",
        "NETWORK=ethernet INTERFACE=eth0,eth1": (
            f"-x NCCL_IB_DISABLE=1 {NCCL}=eth0,eth1 {GLOO}=eth0 {OB1} {TCP} {IF}_include eth0,eth1 python"
        ),
        "NETWORK=infiniband INTERFACE=ib0 UCX_NET_DEVICES=mlx5_0:1 HAS=ucx": (
            f"-x NCCL_IB_DISABLE=0 {NCCL}=ib0 {GLOO}=ib0 -x UCX_NET_DEVICES=mlx5_0:1 "
            "-mca pml ucx -mca btl ^openib python"
        ),
        "NETWORK=infiniband HAS=cm": (
            f"-x NCCL_IB_DISABLE=0 -mca btl_openib_allow_ib 1 {OB1} -mca btl openib,self,vader python"
        ),
        "NETWORK=ethernet MPI_OPTIONS=--mca\tbtl\ttcp,self": (
            f"-x NCCL_IB_DISABLE=1 {OB1} {IF}_exclude docker0,lo --mca btl tcp,self python"
        ),
    }
    info = tmp_path / "ompi_info"
    found = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VIRTUAL_ENV": "foreign"}
    for given, expected in cases.items():
        variables = dict(word.replace("\t", " ").split("=") for word in given.split(" "))
        info.write_text(f"#!/bin/sh\necho mca:pml:ob1:version\necho mca:pml:{variables.get('HAS')}:version\n")
        info.chmod(0o755)
        line = line_of("mpirun", *TRAIN, HOSTS="a:8,b:8", **found, **variables)
        assert expected in line
        options = [word for before, word in pairwise(line.split()) if before.endswith("-mca")]
        assert len(options) == len(set(options))


@pytest.mark.horovod
def test_horovodrun_s_lines_do_not_begin_with_the_rank(tmp_path: Path) -> None:
    words = ["--configs", "configs/digits/cnn.py", "--print-config"]
    done = shell("horovodrun", *words, RANKS="1", DRY_RUN="", MPI_OPTIONS="")
    assert done.returncode == 0 and done.stdout.startswith("seed: ") and "<stdout>" not in done.stdout, done.stderr
    own = line_of("horovodrun", *words, RANKS="1", MPI_OPTIONS="-mca orte_tag_output 1")
    assert own.count("orte_tag_output") == 1


def test_gossip() -> None:
    for name, graph in GOSSIP.items():
        line = line_of(f"gossip/{name}", "configs/more.py", "--configs.seed", "3", RANKS="4")
        topology = f"configs/topology/{graph}.py " if graph else ""
        stack = f"configs/imagenet/resnet50.py configs/gossip/{name}.py {topology}"
        assert "mpirun -np 4 " in line
        assert line.endswith(f"/train.py --configs {stack}configs/more.py --configs.seed 3 \n")
        load(stack.split(), [])
        changed = {"EXPERIMENT": "configs/digits/cnn.py", **({"TOPOLOGY": "ring"} if graph else {})}
        line = line_of(f"gossip/{name}", RANKS="4", LAUNCH="horovodrun", **changed)
        topology = "configs/topology/ring.py " if graph else ""
        assert line.startswith("horovodrun -np 4 ")
        assert line.endswith(f"/train.py --configs configs/digits/cnn.py configs/gossip/{name}.py {topology}\n")


@pytest.mark.horovod
def test_as_many_ranks_start_as_are_asked_for_whatever_open_mpi_takes_for_slots() -> None:
    """By default it has a slot for each physical core, but usable cores are hardware threads."""
    program = "import os; value = os.environ.get('OMPI_MCA_mpi_yield_when_idle', '')\n"
    program += "os.write(1, f'yields: {value}\\n'.encode())"
    for ranks, cores in ((2, 64), (4, 64), (4, 2)):
        command = mpirun(ranks, cores, ["-c", program])
        variables = environment(ranks, cores, os.geteuid() == 0, os.environ)
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=patient(60))
        started = [line for line in done.stdout.splitlines() if line.startswith("yields: ")]
        assert done.returncode == 0 and len(started) == ranks, done.stdout + done.stderr
        # Open MPI's own choice compares ranks with slots
        assert ranks <= cores or set(started) == {"yields: 1"}, "more ranks than cores"
    assert environment(4, 2, False, {"OMPI_MCA_mpi_yield_when_idle": "0"})["OMPI_MCA_mpi_yield_when_idle"] == "0"
