"""Every script of examples/ trains to the state that README.md promises, and a killed Trainer resumes."""

import json
from pathlib import Path
from typing import Any

import pytest
from environment import REPOSITORY
from parallel.ranks import Launcher, mpirun, torchrun, two_agents

EXAMPLES = REPOSITORY / "examples"
WORKER = Path(__file__).with_name("examples_worker.py")
pytestmark = pytest.mark.timeout(300)


def ends(launch: Any, directory: Path, *runs: str, shards: bool = False) -> list[dict[str, Any]]:
    """What runs of scripts on equal replicas end with: losses, accuracy and a hash of the parameters.

    shards: There is one replica, which is sharded over all ranks.
    """
    words = ["-W", "error", str(WORKER), str(directory), json.dumps([run.split() for run in runs])]
    ranks = 4 if launch is two_agents else 2
    done = launch(ranks, words)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[Any] = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    for end, other in zip(sum(found[: ranks // 2], []), sum(found[ranks // 2 :], []), strict=True):
        assert end == ({**other, "state": end["state"]} if shards else other)
    return found[0]


def check_training(end: dict[str, Any]) -> None:
    assert end["losses"][-1] < 0.4 * end["losses"][0] and end["accuracy"] > 80, end


def check_resumed(whole: dict[str, Any], begun: object, resumed: dict[str, Any]) -> None:
    check_training(whole)
    assert resumed == {**whole, "losses": whole["losses"][2:]}


@pytest.mark.horovod
def test_with_horovod(tmp_path: Path) -> None:
    methods = [f"train_horovod.py {method} 6" for method in ("dgc", "powersgd", "2bit")]
    found = ends(mpirun, tmp_path, *methods, "train_gossip.py 6")
    for end in found:
        check_training(end)
    assert len({end["state"] for end in found}) == 4


@pytest.mark.parametrize(
    ("launch", "run"),
    [
        (torchrun, "train_ddp.py 6"),
        pytest.param(torchrun, "train_fsdp2_quantized.py 6", marks=pytest.mark.proof),
        pytest.param(torchrun, "train_gossip.py 6", marks=pytest.mark.proof),
        pytest.param(two_agents, "train_fsdp2.py 16", marks=pytest.mark.proof),
    ],
)
def test_with_torchrun(tmp_path: Path, launch: Launcher, run: str) -> None:
    (end,) = ends(launch, tmp_path, run, shards="quantized" in run)
    check_training(end)


@pytest.mark.parametrize(
    "script",
    [
        "train_accelerate.py",
        *(pytest.param(f"train_{name}.py", marks=pytest.mark.proof) for name in ("transformers", "lightning")),
    ],
)
def test_libraries_resume_bit_for_bit(tmp_path: Path, script: str) -> None:
    runs = [("whole", 6), ("parts", 2), ("parts", 6)]
    check_resumed(*ends(torchrun, tmp_path, *(f"{script} {tmp_path / name} {n}" for name, n in runs)))


@pytest.mark.proof
def test_one_file_on_rank_0_resumes_bit_for_bit(tmp_path: Path) -> None:
    found = []
    for name, epochs in (("whole", 4), ("parts", 2), ("parts", 4)):
        # started one by one, since each of them ends its process group
        found += ends(torchrun, tmp_path, f"train_rank0.py {tmp_path / name} {epochs}")
    check_resumed(*found)


@pytest.mark.proof
def test_a_killed_trainer_resumes_bit_for_bit(tmp_path: Path) -> None:
    def run(part: str, is_killed: bool) -> list[dict[str, Any]]:
        done = torchrun(2, ["-W", "error", str(WORKER.with_name("integrations_worker.py")), str(tmp_path), part])
        assert bool(done.returncode) == is_killed == ("SIGKILL" in done.stderr), done.stdout + done.stderr
        return [json.loads((tmp_path / f"{part}{rank}.json").read_text()) for rank in (0, 1)]

    begun, resumed = run("begin", True), run("resume", False)

    for whole, parts in zip(begun, resumed, strict=True):
        assert whole["dense"]["losses"] == whole["none"]["losses"] and len(whole["none"]["losses"]) == 14
        assert whole["dense"]["model"] == whole["none"]["model"]
        for method in ("powersgd", "onebit", "dgc"):
            assert whole[method]["losses"][-1] < 0.8 * whole[method]["losses"][0], (method, whole[method])
            assert parts[method] == whole[method], method
    for method in ("powersgd", "onebit", "dgc"):
        one, other = (ranks[method] for ranks in begun)
        assert one["model"] == other["model"] and one["errors"] != other["errors"]
    for rank, parts in enumerate(resumed):
        assert "rank 1 has no file" in parts["lacking"]
        assert len(parts["new"]) == (1 if rank == 0 else 0)


@pytest.mark.parametrize("library", ["accelerate", pytest.param("transformers", marks=pytest.mark.proof)])
def test_a_model_that_a_trainer_shards_resumes_bit_for_bit(tmp_path: Path, library: str) -> None:
    worker = str(WORKER.with_name("fsdp_trainers_worker.py"))
    for part in ("whole", "resumed"):
        done = torchrun(2, ["-W", "error", worker, str(tmp_path), library, part])
        assert done.returncode == 0, done.stdout + done.stderr
    files = [tmp_path / f"{library}-{part}" for part in ("whole", "resumed")]
    for rank in range(2):
        whole, resumed = (json.loads(Path(f"{file}{rank}.json").read_text()) for file in files)
        assert whole["losses"][-1] < 0.6 * whole["losses"][0]
        assert resumed["losses"][-4:] == whole["losses"][-4:] and resumed["model"] == whole["model"]
        assert 0 < resumed["sent"] < whole["sent"]
        assert ("its own name" if library == "accelerate" else "QuantizationCallback") in whole["second"]


def test_the_page_names_every_script() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"[{path.name}]({path.name})" in page for path in EXAMPLES.glob("*.py"))
    assert all(len(path.read_text().splitlines()) < 60 for path in EXAMPLES.glob("*.py"))
