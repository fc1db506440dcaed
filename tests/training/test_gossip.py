"""train.py with gossip on simulated ranks: every config, resuming, logs, errors."""

import csv
import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import open_dict, read_write

import train
from dgc.comm.lockstep import LockstepWorld
from dgc_training.checkpoint.reading import read_tensors
from dgc_training.config import ConfigError, instantiate, load
from dgc_training.faults.interruption import Interruption
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.setup import require_complete

CONFIGS = Path(__file__).parents[2] / "configs"
CNN = "configs/digits/cnn.py"
SGP, OSGP = "configs/gossip/sgp.py", "configs/gossip/osgp.py"
QUICK = [
    "--configs.train.num_epochs=2",
    "--configs.train.batch_size=90",
    "--configs.train.warmup_lr_epochs=1",
    "--configs.train.log_every=2",
    "--configs.data.num_threads_per_worker=1",
    "--configs.model.width=8",
]
WAYS = ["configs/gossip/ar.py", SGP, OSGP, "configs/gossip/dpsgd.py"]
GRAPHS = [path for path in sorted((CONFIGS / "topology").glob("*.py")) if path.stem != "__init__"]
AVERAGES = [
    path for path in sorted((CONFIGS / "local").glob("*.py")) if path.stem not in ("__init__", "streaming")
]
STACKS = [
    *([way] for way in WAYS),
    [SGP, "configs/topology/hierarchical.py"],
    *([SGP, f"configs/gossip/{message}.py"] for message in ("fp16", "bf16", "int8")),
    *([OSGP, f"configs/local/{path.stem}.py"] for path in AVERAGES),
    ["configs/local/slowmo.py"],
    ["configs/gossip/choco.py"],
    ["configs/gossip/powergossip.py"],
    [SGP, "configs/gossip/machines.py"],
]
pytestmark = pytest.mark.usefixtures("no_type_checks")


def run(stack: Any, directory: Any, *words: Any, size: int = 2) -> Any:
    args, overrides = parse_arguments(
        ["--configs", CNN, *stack, "--devices", "cpu", *QUICK, "--run-dir", str(directory), *words]
    )
    tree = load(args.configs, overrides)
    require_complete(tree, args.devices)
    LockstepWorld(size).run(lambda transport: train.run(args, tree, transport))
    return json.loads((directory / "summary.json").read_text())


def saved(directory: Any, name: str = "e0002") -> Any:
    folder = directory / "checkpoints" / name
    return [read_tensors(folder / file) for file in ("shared.pt", "rank0.pt", "rank1.pt")]


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: "+".join(Path(p).stem for p in stack))
def test_it_trains(stack: Any, tmp_path: Path) -> None:
    words = ["--configs.train.gossip.graph.local_size=2"] if "configs/topology/hierarchical.py" in stack else []
    summary = run(stack, tmp_path / "run", *words, "--configs.train.num_epochs=1", size=4)
    assert math.isfinite(summary["best"]["acc/test_top1"]) and summary["dropped_steps"] == 0


def test_every_graph_takes_the_number_of_ranks() -> None:
    for path in GRAPHS:
        words = ["--configs.train.gossip.graph.local_size=2"] if path.stem == "hierarchical" else []
        gossip = load([CNN, SGP, f"configs/topology/{path.stem}.py"], words).train.gossip
        for graph in (gossip.graph, *(gossip.graph_from_epoch or {}).values()):
            assert graph is None or instantiate(graph)(4).size == 4, path.stem


def test_it_learns_and_logs_a_row_for_each_rank(tmp_path: Path) -> None:
    summary = run([SGP], tmp_path / "run", "--configs.train.num_epochs=4", size=4)
    assert summary["best"]["acc/test_top1"] > 60
    for rank in range(4):
        with open(tmp_path / "run" / "csv" / f"out_r{rank}_n4.csv") as file:
            rows = list(csv.DictReader(file.readlines()[4:]))
        trained = [row for row in rows if row["itr"] != "-1"]
        assert [row["Epoch"] for row in rows if row["itr"] == "-1"] == ["0", "1", "2", "3"]
        assert float(trained[-1]["weight"]) == 1.0 and float(rows[-1]["consensus"]) > 0
        assert sum(float(row["payload_bytes"]) for row in rows) == pytest.approx(summary["payload_bytes"])
        assert float(rows[-1]["val"]) == pytest.approx(summary["final"]["acc/test_top1"], abs=1e-3)


class Killed(Exception):
    pass


def killed(monkeypatch: pytest.MonkeyPatch, stack: Any, directory: Any, *words: Any) -> None:
    """Runs until an exception after the checkpoint of step 3 of the second epoch."""
    steps = train.Log.step

    def dying(log: Any, loss: Any, samples: Any) -> None:
        if log.progress.epoch == 1 and log.progress.step == 5:
            raise Killed
        steps(log, loss, samples)

    with monkeypatch.context() as patched:
        patched.setattr(train.Log, "step", dying)
        with pytest.raises(Killed):
            run(stack, directory, *EVERY_3, *words)


# without CSV files: one that stays open would be a warning in this process
EVERY_3 = ["--configs.train.checkpoint_every=3", "--configs.train.recorder=null"]


@pytest.mark.parametrize("first", ["all_reduce_first", "two_peers_first"])
def test_the_topology_changes_during_a_run(first: Any, tmp_path: Path) -> None:
    stack = [SGP, f"configs/topology/{first}.py"]
    words = ["--configs.train.recorder=null", "--configs.train.num_epochs=4"]
    words += ["--run-dir", str(tmp_path / "run")]
    args, overrides = parse_arguments(["--configs", CNN, *stack, *QUICK, *words])
    tree = load(args.configs, overrides)
    with open_dict(tree), read_write(tree):
        switch = tree.train.gossip.graph_from_epoch
        switch["2"] = switch.pop("30")
    distances = []
    consensus = train.Log.end_epoch

    def end_epoch(log: Any, results: Any, texts: Any) -> None:
        distances.append(log.optimizer.consensus_distance)
        consensus(log, results, texts)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train.Log, "end_epoch", end_epoch)
        LockstepWorld(4).run(lambda transport: train.run(args, tree, transport))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["best"]["acc/test_top1"] > 60
    if first == "all_reduce_first":
        assert max(distances[:8]) < 1e-4 < min(distances[8:])


@pytest.mark.parametrize("way", [SGP, OSGP, "configs/gossip/dpsgd.py"])
def test_a_run_resumed_in_mid_epoch_ends_bit_identical(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run([way], tmp_path / "straight", *EVERY_3)
    killed(monkeypatch, [way], tmp_path / "killed")
    run([way], tmp_path / "killed", *EVERY_3)
    for one, other in zip(saved(tmp_path / "straight"), saved(tmp_path / "killed"), strict=True):
        flat, again = flattened(one), flattened(other)
        assert flat.keys() == again.keys() and all(torch.equal(flat[k], again[k]) for k in flat)


def flattened(state: Any, where: str = "") -> Any:
    if isinstance(state, dict):
        return {k: v for key in state for k, v in flattened(state[key], f"{where}/{key}").items()}
    return {where: state} if isinstance(state, torch.Tensor) else {}


def test_ranks_save_their_models_and_the_mean(tmp_path: Path) -> None:
    run([OSGP], tmp_path / "run")
    shared, *own = saved(tmp_path / "run")
    (name,) = [key for key in own[0]["compression"] if key.startswith("OSGP")]
    models = [part["compression"][name]["z"] for part in own]
    of_all = [value for key, value in shared["model"].items() if "running" not in key and "num_" not in key]
    mean = torch.cat([value.flatten() for value in of_all])
    assert not torch.equal(*models)
    assert float((sum(models) / 2 - mean).abs().max()) < 1e-6
    momenta = [part["compression"]["optimizer"]["state"][0]["momentum_buffer"] for part in own]
    assert not torch.equal(*momenta)


def test_the_learning_rate_follows_the_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's own optimizer state has the rate for the old number."""
    words = ["--configs.train.scheduler=null", "--configs.train.warmup_lr_epochs=0"]
    words += ["--configs.train.optimizer.lr=0.01"]
    killed(monkeypatch, [SGP], tmp_path / "run", *words)
    with pytest.warns(UserWarning, match="saved by 2 ranks and is resumed by 3"):
        run([SGP], tmp_path / "run", *words, *EVERY_3, size=3)
    rates = [group["lr"] for part in saved(tmp_path / "run") for group in groups_in(part)]
    assert len(rates) == 3 and all(rate == pytest.approx(3 * 0.01) for rate in rates)


def groups_in(state: Any) -> list[Any]:
    """The parameter groups of all optimizers in a state."""
    if not isinstance(state, dict):
        return []
    return state.get("param_groups", []) + [group for value in state.values() for group in groups_in(value)]


@pytest.mark.parametrize("way", [SGP, OSGP])
def test_resuming_on_another_number_of_ranks(way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, [way], tmp_path / "run")
    with pytest.warns(UserWarning, match="saved by 2 ranks and is resumed by 3"):
        summary = run([way], tmp_path / "run", *EVERY_3, size=3)
    assert summary["epochs"] == 2


def test_a_signal_stops_all_ranks_some_steps_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    begin = Interruption.begin_step

    def begin_step(interruption: Any) -> None:
        if interruption.transport.rank == 1:
            steps.append(1)
            interruption.received = signal.SIGUSR1 if len(steps) == 3 else interruption.received
        begin(interruption)

    monkeypatch.setattr(Interruption, "begin_step", begin_step)
    args, overrides = parse_arguments(
        ["--configs", CNN, SGP, "--devices", "cpu", *QUICK, "--run-dir", str(tmp_path / "run"),
         "--configs.train.batch_size=20"]
    )  # fmt: skip
    tree = load(args.configs, overrides)
    assert LockstepWorld(2).run(lambda transport: train.run(args, tree, transport)) == [75, 75]
    assert (tmp_path / "run" / "checkpoints" / "e0000s00019").exists()


# --- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stack", "words", "match"),
    [
        (["configs/topology/ring.py"], [], "stack a file of configs/gossip before it"),
        (["configs/dgc/wm5.py", SGP], [], "DGCCompressor; leave out the one or the other"),
        ([SGP, "configs/dgc/wm5.py"], [], "gossip/__init__.py needs dgc.compression.DenseCompressor; leave"),
        (["configs/local/local_sgd.py", "configs/dgc/wm5.py"], [], "local/__init__.py needs dgc.comp"),
        ([SGP], ["--configs.train.check_replicas_every=4"], "train.check_replicas_every is 4"),
        ([SGP], ["--configs.train.gossip.peers=2"], "takes no keyword 'peers'"),
        ([SGP, "configs/topology/star.py"], ["--configs.train.gossip.graph.hub=7"], "star with 2 ranks: hub"),
        ([SGP, "configs/topology/bipartite_linear.py"], ["3"], "needs an even number of ranks, not 3"),
        (["configs/gossip/dpsgd.py", "configs/topology/star.py"], ["4"], "the shares that rank 0 receives sum to"),
        (["configs/gossip/adpsgd.py"], [], r"connect\(point_to_point=True\)"),
        (["configs/gossip/adpsgd.py"], ["--configs.train.checkpoint_every=5"], "train.checkpoint_every null"),
    ],
)
def test_errors(stack: Any, words: Any, match: Any, tmp_path: Path) -> None:
    size = int(words.pop()) if words and words[-1].isdigit() else 2
    with pytest.raises(ConfigError, match=match):
        run(stack, tmp_path / "run", *words, size=size)
    assert not (tmp_path / "run").exists()


def test_local_steps_in_the_key_of_gossip_name_their_own_key(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("train: {gossip: {_target_: dgc.local.OuterSteps}}")
    with pytest.raises(ConfigError, match=r"train.gossip is dgc.local.OuterSteps, which belongs to train.local"):
        require_complete(load([CNN, mine], []), "cpu")


def test_local_steps_are_over_the_gossip_of_the_stack_in_either_order() -> None:
    for stack in (["configs/local/slowmo.py", SGP], [SGP, "configs/local/slowmo.py"]):
        method = instantiate(load([CNN, *stack], ["--configs.train.gossip.blocking=true"]).train.local)
        assert method.average_every == 48 and method.base.blocking
