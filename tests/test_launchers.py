"""The launch scripts: their commands and errors; the job of SLURM, its signals, and when it is requeued."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from documented import table
from environment import patient, python_path
from simulated import train_on
from warm import python

from dgc_training.config import load
from dgc_training.config_files import REPOSITORY
from scripts.launch import environment, mpirun

ROWS = sorted((REPOSITORY / "scripts/imagenet").glob("batch*.sh"))
SCRIPTS = [
    REPOSITORY / f"scripts/{name}.sh" for name in ("common", "groups", "horovodrun", "mpirun", "slurm", "torchrun")
]
SHELL = [*SCRIPTS, *REPOSITORY.glob("scripts/imagenet/*.sh"), *REPOSITORY.glob("scripts/gossip/*.sh")]
OURS = ("HOSTS", "RANKS", "MPI_OPTIONS", "NETWORK", "INTERFACE", "TOPOLOGY", "EXPERIMENT", "LAUNCH", "REQUEUE")
ELASTIC = ("ELASTIC", "MAX_MACHINES", "MIN_MACHINES", "RENDEZVOUS", "RESTARTS", "RUN_ID", "RDZV_CONF")
FOREIGN = ("SLURM_", "NCCL_", "UCX_", "HOROVOD_")
OWN = {*OURS, *ELASTIC, "DRY_RUN"}
CLEAN = {k: v for k, v in os.environ.items() if k not in OWN and not k.startswith(FOREIGN)}
CLEAN["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the environment may lie anywhere
GOSSIP = {"ar": None, **dict.fromkeys(("sgp", "osgp"), "n_peer_exponential")}
GOSSIP |= dict.fromkeys(("dpsgd", "adpsgd"), "bipartite_exponential")
TRAIN, EXCLUDING = ["--configs", "x"], {"MPI_OPTIONS": "-mca btl_tcp_if_exclude lo"}


def dry_run(script: Path | str, environment: dict[str, str], *words: str, **more: Any) -> Any:
    command, env = ["bash", str(script), *words], {"DRY_RUN": "1", **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=patient(60), **more)


def shell(script: Path | str, *words: str, **variables: str) -> Any:
    file = REPOSITORY / f"scripts/{script}.sh" if isinstance(script, str) else script
    return dry_run(file, CLEAN | variables, *words)


def line_of(script: str, *words: str, **variables: str) -> Any:
    return shell(script, *words, **variables).stdout.replace("\\", "")


def test_shell() -> None:
    checks = [["bash", "-n"], ["shellcheck", "-x", "-P", str(REPOSITORY)]]
    for check, script in product([words for words in checks if shutil.which(words[0])], SHELL):
        done = subprocess.run([*check, str(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", ROWS, ids=lambda script: script.stem)
def test_a_row_of_the_accuracy_table(script: Any) -> None:
    row = next(row for row in table("script in") if row[0] == f"`{script.name}`")
    assert f"ResNet-50 {row[4]}, VGG-16-BN {row[5]}." in script.read_text().splitlines()[1]
    done = shell(script, "vgg16_bn", "--configs.seed", "3")
    words = done.stdout.split()
    assert words[0].endswith("mpirun") and words[-2:] == ["--configs.seed", "3"], done.stderr
    ranks, files = int(words[words.index("-np") + 1]), [word for word in words if word.startswith("configs/")]
    passes = [int(b) for a, b in pairwise(words) if a.endswith("num_batches_per_step")]
    tree = load(files, [f"--configs.train.num_batches_per_step={n}" for n in passes])
    batch = ranks * tree.train.num_batches_per_step * tree.train.batch_size
    dense = script.name == "batch256-dense.sh"
    expected = [256, 8, 8] if dense else [int(row[2]), int(row[1]), int(row[3])]
    assert [batch, ranks * tree.train.num_batches_per_step, ranks] == expected
    assert f"batch{batch}" in script.name and tree.train.dgc is not dense
    cosine = tree.train.scheduler._target_.endswith("CosineAnnealingLR")
    assert cosine is (row[6] == "cosine") and str(tree.model._target_) == "torchvision.models.vgg16_bn"
    assert tree.train.optimizer.lr * tree.train.num_batches_per_step * ranks == pytest.approx(0.1 * batch / 256)
    assert {row[0].strip("`") for row in table("script in")} == {script.name for script in ROWS}


def test_errors_of_launchers() -> None:
    cases: list[tuple[str, dict[str, str], list[str], str]] = [
        *((name, {}, TRAIN, "set the number of ranks") for name in ("mpirun", "torchrun")),
        *((name, {"RANKS": "2"}, [], "no arguments for train.py") for name in ("mpirun", "torchrun")),
        ("mpirun", {"RANKS": "two"}, TRAIN, "RANKS is two"),
        *(("mpirun", {"RANKS": "9" * digits}, TRAIN, "at most 999999") for digits in (7, 20)),
        *(
            ("mpirun", {"HOSTS": hosts}, TRAIN, f"HOSTS is {hosts}; it must have")
            for hosts in ("a:0", ",", "a:4,,b:2")
        ),
        *(("torchrun", {"RANKS": "2", "RENDEZVOUS": f"a:{port}"}, TRAIN, "a port from") for port in (0, 65536)),
        ("torchrun", {"RANKS": "2", "MAX_MACHINES": "9" * 20}, TRAIN, "at most 999999"),
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
        ("torchrun", {"HOSTS": "nowhere:2"}, TRAIN, "set RANKS, its number of ranks"),
        ("torchrun", {"RANKS": "2", "MIN_MACHINES": "3"}, TRAIN, "more than MAX_MACHINES, 1"),
        ("torchrun", {"RANKS": "2", "RENDEZVOUS": "a"}, TRAIN, "RENDEZVOUS is a"),
        ("torchrun", {"RANKS": "2", "RESTARTS": "0"}, TRAIN, "RESTARTS is 0"),
        ("groups", {}, [], "no arguments for train.py"),
        ("groups", {}, TRAIN, "COORDINATOR is not set"),
        ("groups", {"COORDINATOR": "a:0"}, TRAIN, "COORDINATOR is a:0"),
        ("groups", {"COORDINATOR": "a:1"}, TRAIN, "GROUP is not set"),
        ("groups", {"COORDINATOR": "a:1", "GROUP": "x"}, TRAIN, "GROUP is x"),
        ("groups", {"COORDINATOR": "a:1", "GROUP": "1", "HOSTS": "a:1,b:1"}, TRAIN, "a group is on one machine"),
    ]
    unknown = {"HOSTS": "localhost:1,nowhere.invalid:1", "DRY_RUN": ""}
    interface = {"RANKS": "1", "INTERFACE": "lo,eth99", "DRY_RUN": ""}
    for script in ("mpirun", "horovodrun"):
        no_address = f"{script}.sh: HOSTS has nowhere.invalid, but this name has no address"
        absent = f"{script}.sh: there is no interface eth99 (INTERFACE); this machine has: "
        cases += [(script, unknown, TRAIN, no_address), (script, interface, TRAIN, absent)]
    for script, variables, words, message in cases:
        done = shell(script, *words, **variables)
        assert done.returncode == 2 and message in done.stderr and not done.stdout, (script, variables, words)


def test_groups() -> None:
    line = line_of("groups", *TRAIN, COORDINATOR="a:29444", GROUP="3", RANKS="2", FOLDER="/tmp/x")
    assert "agent.py --nproc-per-node 2 --max-restarts 10 --standalone " in line
    assert "groups.address=a:29444" in line and "groups.folder=/tmp/x" in line
    assert line.rstrip().endswith("--configs.train.groups.name=group3 --configs.seed=3")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [([], "--suffix .group2"), (["--run-dir", "r"], "--run-dir r"), (["--suffix=.s"], "--suffix=.s")],
)
def test_groups_of_one_machine_have_run_directories_of_their_own(words: list[str], wanted: str) -> None:
    line = line_of("groups", *TRAIN, *words, COORDINATOR="localhost:29444", GROUP="2")
    assert wanted in line and line.count("--suffix") + line.count("--run-dir") == 1


def test_torchrun() -> None:
    assert "agent.py --nproc-per-node 2 --max-restarts 10 --standalone " in line_of("torchrun", *TRAIN, RANKS="2")
    hosts = f"server0:8,{socket.gethostname()}:3"
    several = line_of("torchrun", *TRAIN, HOSTS=hosts, MIN_MACHINES="2", RDZV_CONF="a=1")
    assert "--nproc-per-node 3 --max-restarts 10 --nnodes 2:2 " in several
    assert "--rdzv-endpoint server0:29400 --rdzv-id dgc " in several
    assert "last_call_timeout=30,read_timeout=30,a=1 " in several
    assert "MIN_MACHINES" in shell("torchrun", "--help").stdout
    # An interface of MPI_OPTIONS replaces the list of excluded ones: Open MPI accepts only one of both lists.
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


def test_network(tmp_path: Path) -> None:
    """HAS: the message layer that the fake ompi_info prints."""
    ob1, tcp, interface = "-mca pml ob1", "-mca btl tcp,self,vader", "-mca btl_tcp_if"
    nccl, gloo = "-x NCCL_SOCKET_IFNAME", "-x HOROVOD_GLOO_IFACE"

    cases = {
        "NETWORK=ethernet": f"-x NCCL_IB_DISABLE=1 {ob1} {tcp} {interface}_exclude docker0,lo python",
        "INTERFACE=eth1": f"{nccl}=eth1 {gloo}=eth1 {ob1} {tcp} {interface}_include eth1 python",
        "NETWORK=ethernet INTERFACE=e0,e1": (
            f"-x NCCL_IB_DISABLE=1 {nccl}=e0,e1 {gloo}=e0 {ob1} {tcp} {interface}_include e0,e1 python"
        ),
        "NETWORK=infiniband INTERFACE=ib0 UCX_NET_DEVICES=mlx5_0:1 HAS=ucx": (
            f"-x NCCL_IB_DISABLE=0 {nccl}=ib0 {gloo}=ib0 -x UCX_NET_DEVICES=mlx5_0:1 "
            "-mca pml ucx -mca btl ^openib python"
        ),
        "NETWORK=infiniband HAS=cm": (
            f"-x NCCL_IB_DISABLE=0 -mca btl_openib_allow_ib 1 {ob1} -mca btl openib,self,vader python"
        ),
        "NETWORK=ethernet MPI_OPTIONS=--mca\tbtl\ttcp,self": (
            f"-x NCCL_IB_DISABLE=1 {ob1} {interface}_exclude docker0,lo --mca btl tcp,self python"
        ),
    }
    info, found = tmp_path / "ompi_info", {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VIRTUAL_ENV": "foreign"}
    for given, expected in cases.items():
        variables = dict(word.replace("\t", " ").split("=") for word in given.split(" "))
        program(info, f"#!/bin/sh\necho mca:pml:ob1:version\necho mca:pml:{variables.get('HAS')}:version\n")
        line = line_of("mpirun", *TRAIN, HOSTS="a:8,b:8", **found, **variables)
        assert expected in line
        options = [word for before, word in pairwise(line.split()) if before.endswith("-mca")]
        assert len(options) == len(set(options))


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
@pytest.mark.parametrize(("ranks", "cores"), [(2, 64), (4, 64), (4, 2)])
def test_as_many_ranks_start_as_are_asked_for(ranks: int, cores: int) -> None:
    """By default Open MPI has a slot for each physical core, but usable cores are hardware threads."""
    program = "import os; value = os.environ.get('OMPI_MCA_mpi_yield_when_idle', '')\n"
    program += "os.write(1, f'yields: {value}\\n'.encode())"
    command = mpirun(ranks, cores, ["-c", program])
    variables = environment(ranks, cores, os.geteuid() == 0, os.environ)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=patient(60))
    started = [line for line in done.stdout.splitlines() if line.startswith("yields: ")]
    assert done.returncode == 0 and len(started) == ranks, done.stdout + done.stderr
    # Open MPI's own choice compares ranks with slots
    assert ranks <= cores or set(started) == {"yields: 1"}, "more ranks than cores"


def test_the_users_choice_to_yield_is_kept() -> None:
    assert environment(4, 2, False, {"OMPI_MCA_mpi_yield_when_idle": "0"})["OMPI_MCA_mpi_yield_when_idle"] == "0"


@pytest.mark.horovod
def test_the_lines_of_ranks_do_not_begin_with_the_rank() -> None:
    words = ["--configs", "configs/digits/cnn.py", "--print-config"]
    done = shell("horovodrun", *words, RANKS="1", DRY_RUN="", MPI_OPTIONS="")
    assert done.returncode == 0 and done.stdout.startswith("seed: ") and "<stdout>" not in done.stdout, done.stderr
    own = line_of("horovodrun", *words, RANKS="1", MPI_OPTIONS="-mca orte_tag_output 1")
    assert own.count("orte_tag_output") == 1


CONTROL = """#!/bin/sh
case "$*" in
    "show hostnames "*) printf "%s\\n" $MACHINES ;;
    *) echo "$*" >>"$CALLS"; exit ${REFUSES:-0} ;;
esac
"""
# In place of srun and mpirun: status 3 by itself, a saved run's status after SIGUSR1, another after SIGTERM. In
# Python, since bash may lose a signal that arrives between two commands.
RUN = f"""#!{sys.executable} -S
import os, signal, time
def ends(word, status):
    def handler(*_):
        with open(os.environ["CALLS"], "a") as calls:
            print(word, file=calls)
        time.sleep(0.3)
        os._exit(status)
    return handler
signal.signal(signal.SIGUSR1, ends("signal", int(os.environ.get("SAVED", 75))))
signal.signal(signal.SIGTERM, ends("terminated", 143))
print("started", flush=True)
for _ in range(int(os.environ.get("LONG", 6000))):
    time.sleep(0.1)
os._exit(3)
"""


def program(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


def job(tmp_path: Path, **variables: str) -> tuple[Path, dict[str, str]]:
    """A copy of the script, as SLURM creates it, and its environment: 2 machines with 4 ranks each."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "scontrol", CONTROL)
    copy = Path(shutil.copy(REPOSITORY / "scripts/slurm.sh", tmp_path / "job"))
    environment = {**CLEAN, "PATH": f"{tmp_path / 'bin'}:{CLEAN['PATH']}"}
    environment |= {"SLURM_JOB_NODELIST": "node[3-4]", "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}
    environment |= {"SLURM_NTASKS": "8", "SLURM_SUBMIT_DIR": str(REPOSITORY), "MACHINES": "node3 node4"}
    return copy, environment | {"VIRTUAL_ENV": sys.prefix, "CALLS": str(tmp_path / "calls")} | variables


@contextmanager
def started(script: Path, environment: dict[str, str], *words: str) -> Iterator[subprocess.Popen[str]]:
    """The job in a separate session. At the end all processes of the session are killed."""
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(["bash", str(script), *words], env=environment, **how) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    text = ""
    while words not in text:
        line = process.stdout.readline()
        assert line, f"ended before {words!r}:\n{text}"
        text += line
    return text


def send(process: subprocess.Popen[str], number: int) -> None:
    """While the job waits for the run: bash ignores a signal between its last look for signals and its wait."""
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.01)
    process.send_signal(number)


def test_the_command(tmp_path: Path) -> None:
    copy, environment = job(tmp_path)
    for words in (TRAIN, ["scripts/imagenet/batch256.sh", "resnet50"], ["scripts/gossip/sgp.sh"]):
        done = dry_run(copy, environment, *words)
        assert "mpirun -np 8 -H node3:4\\,node4:4 " in done.stdout and done.returncode == 0, done.stderr
        wrong = dry_run(copy, {**environment, "SLURM_SUBMIT_DIR": str(tmp_path)}, *words)
        assert wrong.returncode == 2 and "repository's root" in wrong.stderr
    # sbatch scripts/gossip/sgp.sh: SLURM copies that file alone
    alone = shutil.copy(REPOSITORY / "scripts/gossip/sgp.sh", tmp_path / "slurm_script")
    done = dry_run(alone, environment, "--suffix", ".a")
    assert "mpirun -np 8 -H node3:4\\,node4:4 " in done.stdout, done.stderr
    assert "configs/gossip/sgp.py" in done.stdout and done.stdout.endswith("--suffix .a \n")
    environment["ELASTIC"] = "1"
    done = dry_run(copy, environment, *TRAIN)
    srun, torchrun = done.stdout.splitlines()
    assert srun.startswith("srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --no-kill "), done.stderr
    assert "--nproc-per-node 4 --max-restarts 10 --nnodes 1:2 " in torchrun
    assert "--rdzv-endpoint node3:20017 --rdzv-id 17 " in torchrun
    wrong = dry_run(copy, environment, "scripts/gossip/sgp.sh")
    assert wrong.returncode == 2 and "not a script" in wrong.stderr


def test_ranks_of_uneven_allocations(tmp_path: Path) -> None:
    copy, environment = job(tmp_path)
    machines = {"MACHINES": "a b c d", "SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS": "30"}
    uneven = "-np 30 -H a:8\\,b:8\\,c:7\\,d:7 "
    for variables, expected in (
        ({"SLURM_TASKS_PER_NODE": "8(x2),7(x2)"}, uneven),
        # here 8 is the most that a machine gets
        ({"SLURM_TASKS_PER_NODE": "8(x2),7(x2)", "SLURM_NTASKS_PER_NODE": "8"}, uneven),
        ({"SLURM_TASKS_PER_NODE": "9,7(x3)"}, "-np 30 -H a:9\\,b:7\\,c:7\\,d:7 "),
        ({"SLURM_TASKS_PER_NODE": "8(x4)", "SLURM_NTASKS": ""}, "-np 32 -H a:8\\,b:8\\,c:8\\,d:8 "),
        ({"SLURM_NTASKS": "8"}, "-np 8 -H a:2\\,b:2\\,c:2\\,d:2 "),
        ({"SLURM_NTASKS": ""}, "-np 4 -H a:1\\,b:1\\,c:1\\,d:1 "),
        ({"ELASTIC": "1", "SLURM_TASKS_PER_NODE": "8(x4)"}, "--nproc-per-node 8 "),
        ({}, "SLURM_NTASKS is 30, which is no multiple of the 4 machines: "),
        ({"SLURM_TASKS_PER_NODE": "8(x2),7"}, "SLURM_TASKS_PER_NODE is 8(x2),7, but there are 4 machines"),
        ({"SLURM_TASKS_PER_NODE": "8(y2),7"}, "SLURM_TASKS_PER_NODE is 8(y2),7; it must have the form 8(x2),7"),
        ({"ELASTIC": "1", "SLURM_TASKS_PER_NODE": "8(x2),7(x2)"}, "ELASTIC=1 needs as many tasks on each machine"),
    ):
        done, refused = dry_run(copy, {**environment, **machines, **variables}, *TRAIN), expected[0] != "-"
        assert done.returncode == (2 if refused else 0), (variables, done)
        assert expected in (done.stderr if refused else done.stdout), (variables, done)
        assert not (refused and done.stdout), variables


def test_a_dry_run_needs_no_slurm(tmp_path: Path) -> None:
    _, environment = job(tmp_path)
    outside = {k: v for k, v in environment.items() if not k.startswith("SLURM_")}
    scripts = REPOSITORY / "scripts"
    cases = [({}, "1 -H node1:1 "), ({"RANKS": "4"}, "4 -H node1:4 "), ({"HOSTS": "a:2,b:2"}, "4 -H a:2\\,b:2 ")]
    for script, words in (("slurm.sh", TRAIN), ("gossip/sgp.sh", ["--suffix", ".a"])):
        for variables, expected in cases:
            done = dry_run(scripts / script, {**outside, **variables, "LAUNCH": "slurm"}, *words, cwd=tmp_path)
            assert f"mpirun -np {expected}" in done.stdout and done.returncode == 0, done.stderr
            assert done.stdout.endswith(f"{words[-1]} \n") and "not a SLURM job" in done.stderr
    done = subprocess.run(["bash", scripts / "slurm.sh", *TRAIN], env=outside, capture_output=True, text=True)
    assert done.returncode == 2 and "submit it with sbatch" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize(
    ("variables", "status", "calls"),
    [
        ({}, 0, ["signal", "requeue 17"]),
        ({"REQUEUE": "scontrol -v again"}, 0, ["signal", "-v again 17"]),
        ({"REQUEUE": ""}, 75, ["signal"]),
        ({"REFUSES": "1"}, 75, ["signal", "requeue 17"]),
        *(({"SAVED": status}, int(status), ["signal"]) for status in "10"),
        ({"ELASTIC": "1"}, 0, ["terminated", "requeue 17"]),  # torchrun does not pass on the status of its ranks
    ],
)
def test_requeue(tmp_path: Path, number: Any, variables: Any, status: Any, calls: Any) -> None:
    """SAVED: the exit status of the run after a signal. REFUSES: the exit status of scontrol."""
    copy, environment = job(tmp_path, **variables)
    program(tmp_path / "bin" / ("srun" if "ELASTIC" in variables else "mpirun"), RUN)
    with started(copy, environment, *TRAIN) as process:
        read_until(process, "started")
        send(process, number)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)  # SLURM's signal at the time limit, which is not forwarded
        text = process.communicate(timeout=patient(60))[0]
        assert process.returncode == status, text
    assert Path(environment["CALLS"]).read_text().splitlines() == calls
    assert ("submit the job again" in text) == ("REFUSES" in variables)
    if not variables:  # without a signal the job has the run's own status
        Path(environment["CALLS"]).unlink()
        alone: Any = {"env": {**environment, "LONG": "2"}, "capture_output": True, "timeout": patient(60)}
        assert subprocess.run(["bash", copy, *TRAIN], **alone).returncode == 3
        assert not Path(environment["CALLS"]).exists()


@pytest.mark.proof
@pytest.mark.horovod
def test_the_requeued_job_finishes_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy, environment = job(tmp_path, MACHINES="localhost", SLURM_NTASKS="2", SLURM_JOB_NUM_NODES="1")
    environment |= {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "PYTHONPATH": python_path()}
    (tmp_path / "bin" / "python").symlink_to(python())
    run = tmp_path / "run"
    words = ["--configs", "configs/digits/cnn.py", "--devices", "cpu", "--run-dir", str(run)]
    words += ["--configs.train.num_epochs=5", "--configs.train.checkpoint_every=5", "--configs.model.width=8"]
    with started(copy, environment, *words) as process:
        text = read_until(process, " 1/5 ")
        send(process, signal.SIGTERM)
        text += process.communicate(timeout=patient(60))[0]
        assert process.returncode == 0, text
    assert "Stopped by SIGUSR1: saved e000" in text and "slurm.sh: saved; scontrol requeue 17" in text
    assert Path(environment["CALLS"]).read_text() == "requeue 17\n" and not (run / "summary.json").exists()
    # The requeued job runs the same command.
    train_on(2, words)
    assert "resumed from checkpoint e000" in capsys.readouterr().out and (run / "summary.json").exists()


def test_config_files_that_scripts_name_exist() -> None:
    for script in (REPOSITORY / "scripts").rglob("*.sh"):
        for name in re.findall(r"\bconfigs/[\w/]+\.\w*", script.read_text()):
            assert (REPOSITORY / name).exists(), f"{script} names {name}"
