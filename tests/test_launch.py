"""Which transport each launcher means, and launchers that a transport does not understand, which are refused."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from cases import case
from environment import REPOSITORY, patient
from refusals import check_refusals

import dgc.comm.connect
from dgc import launch
from dgc.comm import torch_distributed
from dgc.comm.connect import choose_transport
from dgc.launch import LAUNCHERS, PORTS, LaunchError, check_launcher, choose, torch_variables


def refuse(act: Callable[[], object], words: str) -> None:
    check_refusals((act, words), kind=LaunchError)


def of(name: str, rank: int, size: int, **more: str) -> dict[str, str]:
    """The variables of a process that the launcher of this name started."""
    (own,) = (launcher for launcher in LAUNCHERS if launcher.name == name)
    return {own.rank: str(rank), own.size: str(size), **({own.marker: "none"} if own.marker else {}), **more}


JOB = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}  # the batch script of a job
PTY = {**JOB, "SLURM_STEP_NUM_TASKS": "1"}  # srun -n 1 --pty bash
COPIED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "server0"}  # set from mpirun's variables by a script
BY_TORCHRUN, SRUN = ("torch.distributed (started by torchrun)",) * 2, "torch.distributed (started by srun"
MISSING = "; Horovod is not installed: `make setup` builds it)"
PMIX = f"torch.distributed (started by srun with PMIx{MISSING}"
BY_MPIRUN = ("Horovod (started by mpirun)", f"torch.distributed (started by mpirun{MISSING}")
ENVIRONMENTS: dict[str, tuple[dict[str, str], str, str, tuple[int, int]]] = {
    # environment: (variables, choice with Horovod, choice without it, rank and size)
    "none": ({}, "Horovod (installed, and", "torch.distributed (there is no launcher; H", (0, 1)),
    "a batch script": (JOB, "Horovod (installed", "torch.distributed (there is no", (0, 1)),
    "a shell of srun": (PTY, "Horovod (installed", "torch.distributed (there is no", (0, 1)),
    "torchrun": ({**COPIED, "TORCHELASTIC_RUN_ID": "none"}, *BY_TORCHRUN, (1, 4)),
    "torchrun with one rank": (of("torchrun", 0, 1), *BY_TORCHRUN, (0, 1)),
    "torch's variables": (COPIED, "torch.distributed (started by RANK", "torch.distributed (started by R", (1, 4)),
    "mpirun": (of("mpirun", 1, 4), "Horovod (started by mpirun)", "torch.distributed (started by mpirun", (1, 4)),
    "horovodrun": (of("horovodrun", 1, 4), "Horovod (started by horovodrun)", "torch.distributed (", (1, 4)),
    "PMI": (of("PMI", 1, 4), "Horovod (started by PMI)", "torch.distributed (started by PMI; Horovod", (1, 4)),
    "srun": (of("srun", 1, 4), f"{SRUN})", SRUN, (1, 4)),
    "mpirun's rank without its size": (of("srun", 1, 4, OMPI_COMM_WORLD_RANK="3"), SRUN, SRUN, (1, 4)),
    "srun --mpi=pmix": (of("srun", 1, 4, PMIX_RANK="1"), "Horovod (started by srun with PMIx)", PMIX, (1, 4)),
    # srun starts mpirun's daemons, one per machine
    "mpirun in a job": ({**JOB, **of("srun", 1, 2), **of("mpirun", 5, 8, PMIX_RANK="5")}, *BY_MPIRUN, (5, 8)),
    "torchrun in srun": ({**JOB, **of("srun", 1, 2), **of("torchrun", 5, 8)}, *BY_TORCHRUN, (5, 8)),
    "torchrun in mpirun": ({**of("mpirun", 1, 2, PMIX_RANK="1"), **of("torchrun", 5, 8)}, *BY_TORCHRUN, (5, 8)),
    "torchrun in a shell of mpirun": ({**of("mpirun", 0, 1), **of("torchrun", 1, 2)}, *BY_TORCHRUN, (1, 2)),
    "mpirun and a script that sets torch's variables": ({**of("mpirun", 1, 4), **COPIED}, *BY_MPIRUN, (1, 4)),
}


def test_the_launcher_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (environment, with_horovod, without, (rank, size)) in ENVIRONMENTS.items():
        with case(name):
            for installed, expected in ((True, with_horovod), (False, without)):
                choice = choose("auto", environment, installed)
                assert str(choice).startswith(expected), str(choice)
                for wanted in ("horovod", "torch"):
                    assert str(choose(wanted, environment, installed)).endswith("(as set)")
                    assert choose(wanted, environment, installed, running="torch").transport == wanted
                    assert str(choose("auto", environment, installed, wanted)).endswith("(initialised already)")
                    assert choose("auto", environment, installed, wanted).transport == wanted
                if "SLURM_NTASKS" not in environment or size > 1:
                    check_launcher(environment, transport=choice.transport)
            started = launch.started_by(environment)
            assert (rank, size) == ((0, 1) if started is None else (started.rank, started.size))
    with pytest.raises(ValueError, match="must be auto, horovod or torch, not 'gloo'"):
        choose("gloo", {}, installed=True)
    # what is initialised is taken
    for running, name in ((["torch"], "torch.distributed"), (["horovod", "torch"], "Horovod")):
        monkeypatch.setattr(dgc.comm.connect, "running_transports", lambda running=running: running)
        assert str(choose_transport()) == f"{name} (initialised already)"
    assert choose_transport("torch").transport == "torch"
    # ranks on one machine are known where the launcher says so
    for name, more in (("OMPI_COMM_WORLD", {"PMIX_RANK": "0"}), ("HOROVOD", {})):
        for local_size, spans in (("4", False), ("2", True)):
            environment = {f"{name}_SIZE": "4", f"{name}_LOCAL_SIZE": local_size, **more}
            assert launch.may_span_machines(environment) == spans, environment
    assert not launch.may_span_machines({})
    assert all(map(launch.may_span_machines, ({"PMI_SIZE": "4"}, {"PMIX_RANK": "1"})))


# A rank, the process that starts it, and an end of both that the test does not have to arrange.


def test_restarts_through_a_shared_store_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"

    def check(*values: str) -> None:
        check_launcher(of("torchrun", 0, 2, **dict(zip(names, values, strict=True))), transport="torch")

    check("0", "True")
    check("3", "False")
    refuse(partial(check, "3", "True"), "--max-restarts 3: .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    # dgc.ddp.compress connects the ranks by this function, after the script has initialised torch.distributed
    for name, value in zip(names, ("3", "True"), strict=True):
        monkeypatch.setenv(name, value)
    refuse(torch_distributed.connect, "--max-restarts 3: .*Gloo connectFullMesh failed")


def test_launchers_that_start_more_ranks_than_a_transport_sees_are_refused() -> None:
    pmix = {"SLURM_STEP_NUM_TASKS": "4", "PMIX_RANK": "0"}
    both = {"SLURM_NTASKS": "8", "OMPI_COMM_WORLD_SIZE": "4"}
    horovod: list[tuple[dict[str, str], int | None, str]] = [
        ({"WORLD_SIZE": "4", "RANK": "1"}, None, "WORLD_SIZE is 4, but Horovod sees 1 rank.* horovodrun -np 4"),
        ({"WORLD_SIZE": "4", "RANK": "1"}, None, r"or use the transport torch \(train.transport\)"),
        ({"WORLD_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "2"}, None, "WORLD_SIZE is 4, but Horovod sees 2 ranks"),
        ({"PMI_SIZE": "4"}, 1, "PMI_SIZE is 4, but Horovod sees 1 rank"),  # the mpirun of another MPI
        ({"SLURM_NTASKS": "8"}, None, "SLURM_NTASKS is 8, .* scripts/slurm.sh .* env -u SLURM_NTASKS"),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}, None, "SLURM_STEP_NUM_TASKS is 4, .* srun --mpi"),
        (pmix, 1, "SLURM_STEP_NUM_TASKS is 4"),
    ]
    torch: list[tuple[dict[str, str], int | None, str]] = [
        (JOB, None, "SLURM_NTASKS is 8, but torch.distributed sees 1 rank: .* srun -n 8 or torchrun"),
        ({"WORLD_SIZE": "4"}, None, "WORLD_SIZE is 4, .* torchrun --nproc-per-node 4. .* env -u WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, None, "OMPI_COMM_WORLD_SIZE is 4, but torch.distributed sees 1 rank"),
        ({**of("mpirun", 0, 4), **of("torchrun", 0, 1)}, None, "OMPI_COMM_WORLD_SIZE is 4"),
        ({**of("mpirun", 0, 2), "RANK": "0", "WORLD_SIZE": "4"}, None, "WORLD_SIZE is 4, but .* sees 2 ranks"),
        (of("srun", 0, 4), 1, "SLURM_STEP_NUM_TASKS is 4"),
    ]
    for transport, rows in (("horovod", horovod), ("torch", torch)):
        for environment, size, message in rows:
            refuse(partial(check_launcher, environment, size, transport), message)
    for environment, size in (({}, 1), (both, 4), (PTY, 1), ({"WORLD_SIZE": "2"}, 4)):
        check_launcher(environment, size)
    alike = {"WORLD_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "4"}
    # with PMIx, the number is not in the environment
    for environment in ({}, both, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "four", "SLURM_NTASKS": ""}, alike, pmix):
        check_launcher(environment)
    for environment in (PTY, {**JOB, **of("torchrun", 0, 2)}, {**JOB, **of("mpirun", 0, 2)}):
        check_launcher(environment, transport="torch")


def test_the_variables_of_torch_under_other_launchers() -> None:
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "98762"}
    found = torch_variables(of("mpirun", 1, 4, **local))
    ranks = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert int(found.pop("MASTER_PORT")) in PORTS and found == {**ranks, "MASTER_ADDR": "127.0.0.1"}
    jobs = [of("mpirun", 0, 4, **{**local, "PMIX_NAMESPACE": str(n)}) for n in range(99)]
    assert len({torch_variables(job)["MASTER_PORT"] for job in jobs}) > 90, "runs rarely share a port"
    # an old RANK of another launcher does not count; an address that the user gives does
    given = {"MASTER_ADDR": "server0", "MASTER_PORT": "29500"}
    found = torch_variables({**of("mpirun", 5, 8, **local), "RANK": "0", "WORLD_SIZE": "1", **given})
    assert found == {**ranks, "RANK": "5", "WORLD_SIZE": "8", **given}
    assert torch_variables({}) == torch_variables(PTY) == torch_variables(of("mpirun", 0, 1)) == {}
    torchrun = of("torchrun", 1, 4, LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", **given)
    assert torch_variables(torchrun).items() <= torchrun.items()
    # the address of rank 0 under srun
    job = of("srun", 3, 8, SLURM_JOB_ID="17", SLURM_STEP_ID="0", SLURM_LOCALID="3")
    job["SLURM_LAUNCH_NODE_IPADDR"] = "10.0.0.1"
    nodes = {"node3": "node3", "node3,node7": "node3", "node[3-4,7]": "node3"}
    for several, first in {**nodes, "gpu[03-05,7]-ib,login1": "gpu03-ib", "r[1-2]n[08,10]": "r1n08"}.items():
        found = torch_variables({**job, "SLURM_STEP_NODELIST": several})
        assert (found["MASTER_ADDR"], found["RANK"], found["LOCAL_RANK"]) == (first, "3", "3")
        assert int(found["MASTER_PORT"]) in PORTS
    assert torch_variables(job)["MASTER_ADDR"] == "10.0.0.1"
    # what is missing is named
    for environment, message in (
        (of("mpirun", 5, 8, OMPI_COMM_WORLD_LOCAL_SIZE="4"), "mpirun started 8 ranks, .* -x MASTER_ADDR=server0"),
        (of("mpirun", 1, 4, OMPI_COMM_WORLD_LOCAL_SIZE="4"), "but MASTER_PORT is not set"),
        (of("srun", 1, 4, SLURM_JOB_ID="17"), "srun started 4 ranks, but MASTER_ADDR is not set"),
        (of("PMI", 1, 4), "MASTER_ADDR and MASTER_PORT are not set. .* export MASTER_ADDR=server0"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE started 2 ranks, but MASTER_ADDR and"),
    ):
        refuse(partial(torch_variables, environment), message)


def printed(program: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.horovod
def test_a_loop_of_the_users_own_under_torchrun_is_refused_before_horovod_starts() -> None:
    program = """
import horovod.torch as hvd
from dgc.comm.horovod import connect
try:
    connect()
except ValueError as error:
    print(hvd.is_initialized(), error)
"""
    assert printed(program, RANK="0", WORLD_SIZE="2").startswith("False WORLD_SIZE is 2")


def test_nothing_imports_horovod_until_it_is_chosen() -> None:
    program = """
import sys, train, dgc, dgc.comm.connect, dgc.compression, dgc.gossip, dgc.memory, dgc.optim, dgc.testing
print([name for name in sys.modules if name.split(".")[0] in ("horovod", "mpi4py") or name == "dgc.comm.horovod"])
"""
    assert printed(program) == "[]\n"


RANK = "import os, time, dgc.launch as l; print(os.getpid(), l.end_with_launcher(os.environ, 0.05), flush=True)"
RANK += "; time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RANK!r}])"
LAUNCHED = [of("torchrun", 0, 1), of("mpirun", 1, 4), of("horovodrun", 1, 4)]


@pytest.mark.parametrize("variables", [*LAUNCHED, COPIED, PTY, {}])
def test_a_rank_ends_with_its_launcher(variables: dict[str, str]) -> None:
    ends = variables in LAUNCHED
    others = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "HOME")}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, cwd=REPOSITORY, env=others | variables, **pipes) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        rank, watches = parent.stdout.readline().split()
        assert watches == str(ends)
        parent.kill()
        if not ends:
            os.kill(int(rank), signal.SIGKILL)
        # the rank holds the other end of the pipe until it has ended
        said = parent.stderr.read()
    assert (f"its launcher (process {parent.pid}) has ended" in said) == ends
