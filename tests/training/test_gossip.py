"""train.py with gossip on simulated ranks: what is learned, logged and saved."""

import csv
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import open_dict, read_write
from simulated import CNN, rewound, saved, summary_of, train_in

import train
from dgc.comm.lockstep import LockstepWorld
from dgc_training.config import ConfigError, instantiate, load
from dgc_training.faults.interruption import Interruption
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.setup import require_complete

SGP, OSGP = "configs/gossip/sgp.py", "configs/gossip/osgp.py"
QUICK = "train.num_epochs=2 train.batch_size=90 train.warmup_lr_epochs=1 train.log_every=2".split()
QUICK += ["data.num_threads_per_worker=1", "model.width=8"]
pytestmark = pytest.mark.usefixtures("no_type_checks")


def test_it_learns_and_logs_a_row_for_each_rank(tmp_path: Path) -> None:
    train_in(tmp_path, [CNN, SGP], [*QUICK, "train.num_epochs=4"], size=4)
    summary = summary_of(tmp_path)
    assert summary["best"]["acc/test_top1"] > 60
    for rank in range(4):
        with open(tmp_path / "csv" / f"out_r{rank}_n4.csv") as file:
            rows = list(csv.DictReader(file.readlines()[4:]))
        trained = [row for row in rows if row["itr"] != "-1"]
        assert [row["Epoch"] for row in rows if row["itr"] == "-1"] == ["0", "1", "2", "3"]
        assert float(trained[-1]["weight"]) == 1.0 and float(rows[-1]["consensus"]) > 0
        assert sum(float(row["payload_bytes"]) for row in rows) == pytest.approx(summary["payload_bytes"])
        assert float(rows[-1]["val"]) == pytest.approx(summary["final"]["acc/test_top1"], abs=1e-3)


@pytest.mark.parametrize("first", ["all_reduce_first", "two_peers_first"])
def test_the_topology_changes_during_a_run(first: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"--configs.{word}" for word in [*QUICK, "train.recorder=null", "train.num_epochs=4"]]
    stack = [CNN, SGP, f"configs/topology/{first}.py"]
    args, overrides = parse_arguments(["--configs", *stack, "--run-dir", str(tmp_path), *words])
    tree = load(args.configs, overrides)
    with open_dict(tree), read_write(tree):
        switch = tree.train.gossip.graph_from_epoch
        switch["2"] = switch.pop("30")
    distances, end = [], train.Log.end_epoch

    def end_epoch(log: Any, results: Any, texts: Any) -> None:
        distances.append(log.optimizer.consensus_distance)
        end(log, results, texts)

    monkeypatch.setattr(train.Log, "end_epoch", end_epoch)
    LockstepWorld(4).run(lambda transport: train.run(args, tree, transport))
    assert summary_of(tmp_path)["best"]["acc/test_top1"] > 60
    if first == "all_reduce_first":
        assert max(distances[:8]) < 1e-4 < min(distances[8:])


def test_ranks_save_their_models_and_the_mean(tmp_path: Path) -> None:
    train_in(tmp_path, [CNN, OSGP], QUICK)
    files = saved(tmp_path)
    own = [files[f"rank{rank}"]["compression"] for rank in range(2)]
    (name,) = [key for key in own[0] if key.startswith("OSGP")]
    models = [part[name]["z"] for part in own]
    shared = files["shared"]["model"].items()
    mean = torch.cat([value.flatten() for key, value in shared if "running" not in key and "num_" not in key])
    assert not torch.equal(*models)
    assert float((sum(models) / 2 - mean).abs().max()) < 1e-6
    assert not torch.equal(*(part["optimizer"]["state"][0]["momentum_buffer"] for part in own))


def groups_in(state: Any) -> list[Any]:
    """The parameter groups of all optimizers in a state."""
    if not isinstance(state, dict):
        return []
    return state.get("param_groups", []) + [group for value in state.values() for group in groups_in(value)]


def test_the_learning_rate_follows_the_number_of_ranks(tmp_path: Path) -> None:
    """Each rank's own optimizer state has the rate for the old number."""
    settings = [*QUICK, "train.scheduler=null", "train.warmup_lr_epochs=0", "train.optimizer.lr=0.01"]
    settings += ["train.checkpoint_every=3", "train.recorder=null"]
    train_in(tmp_path / "run", [CNN, SGP], settings)
    again = rewound(tmp_path / "run", tmp_path / "again", "e0001s00003")
    with pytest.warns(UserWarning, match="saved by 2 ranks and is resumed by 3"):
        train_in(again, [CNN, SGP], settings, size=3)
    rates = [group["lr"] for name in ("shared", "rank0", "rank1") for group in groups_in(saved(again)[name])]
    assert len(rates) == 3 and all(rate == pytest.approx(3 * 0.01) for rate in rates)


def test_a_signal_stops_all_ranks_some_steps_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, begin = [], Interruption.begin_step

    def begin_step(interruption: Any) -> None:
        if interruption.transport.rank == 1:
            steps.append(1)
            interruption.received = signal.SIGUSR1 if len(steps) == 3 else interruption.received
        begin(interruption)

    monkeypatch.setattr(Interruption, "begin_step", begin_step)
    assert train_in(tmp_path, [CNN, SGP], [*QUICK, "train.batch_size=20"]) == [75, 75]
    assert (tmp_path / "checkpoints" / "e0000s00019").exists()


def test_local_steps_have_their_own_key_and_are_over_the_gossip_of_the_stack(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("train: {gossip: {_target_: dgc.local.OuterSteps}}")
    with pytest.raises(ConfigError, match=r"train.gossip is dgc.local.OuterSteps, which belongs to train.local"):
        require_complete(load([CNN, mine], []), "cpu")
    for stack in (["configs/local/slowmo.py", SGP], [SGP, "configs/local/slowmo.py"]):
        method = instantiate(load([CNN, *stack], ["--configs.train.gossip.blocking=true"]).train.local)
        assert method.average_every == 48 and method.base.blocking
