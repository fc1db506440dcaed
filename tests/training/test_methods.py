"""Methods on simulated ranks: every config file trains, and what gossip, Adam and fp16 learn, log and save."""

import csv
import math
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from omegaconf import OmegaConf
from pytest import CaptureFixture, MonkeyPatch
from simulated import CNN, assert_same_end, rewound, saved, summary_of, train_in

import train
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor
from dgc.optim import DistributedOptimizer, MuonWithAdamW
from dgc_training import stepping
from dgc_training.checkpoint.validation import check_hyperparameters
from dgc_training.config import ConfigError, instantiate, load, to_yaml
from dgc_training.faults.interruption import Interruption
from dgc_training.startup.agreement import config_differences
from dgc_training.startup.build import build_method, open_transport
from dgc_training.startup.setup import require_complete
from dgc_training.tasks.language_model import LanguageModel
from dgc_training.tasks.protocol import Loss

CONFIGS = Path(__file__).parents[2] / "configs"
SETTINGS = "train.num_epochs=1 train.batch_size=180 train.warmup_lr_epochs=0 train.checkpoint_every=null".split()
SETTINGS += ["data.num_threads_per_worker=1", "model.width=8"]
BEFORE = {
    "threshold/server": ["threshold/2bit"],
    "route/matrices_only": ["quant/qsgd"],
    "adam/fp16": ["adam/onebit_adam"],
    "contrib/zero_one_adam": ["adam/__init__"],
    "dgc/reduce_scatter": ["dgc/wm0", "dgc/int32"],
}
# the small model is less than one chunk of the default size, and an epoch has four steps
ALSO = {
    **dict.fromkeys(("adam/onebit_adam", "adam/dgc_adam", "adam/fp16"), ["train.optimizer.freeze_step=2"]),
    "contrib/zero_one_adam": ["train.local.var_freeze_step=2"],
    "adam/dgc": ["train.compression.warmup_epochs=0"],
}
ADAM, ONEBIT_ADAM, GPT = "configs/adam", "configs/adam/onebit_adam.py", "configs/pysource/gpt.py"
SGP, OSGP, FIRST_SCALE = "configs/gossip/sgp.py", "configs/gossip/osgp.py", 65536.0
QUICK = "train.num_epochs=2 train.batch_size=90 train.warmup_lr_epochs=1 train.log_every=2".split()
QUICK += ["data.num_threads_per_worker=1", "model.width=8"]
FP16 = "train.precision=fp16 train.num_epochs=2 train.batch_size=4 train.checkpoint_every=2".split()
FP16 += "train.check_replicas_every=1 train.scheduler.warmup_steps=2 data.num_threads_per_worker=1".split()
FP16 += "dataset.characters=20000 dataset.vocabulary_size=64 task.context=8 task.steps_per_epoch=5".split()
FP16 += ["model.width=16", "model.heads=2"]


def names(*folders: str) -> list[str]:
    """The files that extend a stack, without the files of which every stack has one, and without a coordinator."""
    files = [f"{path.parent.name}/{path.stem}" for of in folders for path in sorted((CONFIGS / of).glob("*.py"))]
    return [name for name in files if not name.endswith(("/__init__", "/momentum", "/streaming", "/groups"))]


COMPRESSION = names("chunks", "powersgd", "threshold", "quant", "sparse", "adam", "route")
COMPRESSION += ["dgc/reduce_scatter", "contrib/gtopk", "contrib/zero_one_adam"]
GOSSIP = [
    *(["gossip/" + name] for name in ("ar", "sgp", "osgp", "dpsgd")),
    ["contrib/choco"],
    ["contrib/powergossip"],
    *(["gossip/sgp", "gossip/" + name] for name in ("fp16", "bf16", "int8", "machines")),
    *(["gossip/osgp", name] for name in names("local")),
    ["gossip/sgp", "topology/hierarchical"],
    ["local/slowmo"],
    ["local/momentum"],
]
pytestmark = pytest.mark.usefixtures("no_type_checks")


@pytest.mark.filterwarnings("ignore:DGCCompressor sends an element seldom")
@pytest.mark.parametrize("name", COMPRESSION)
def test_a_file_of_compression_trains_with_fewer_bytes(name: str, tmp_path: Path) -> None:
    also = ["train.compression.chunk_size=200"] if name.startswith("chunks/") else ALSO.get(name, [])
    every = 0 if name == "contrib/zero_one_adam" else 1  # between exchanges the ranks of 0/1 Adam differ
    stack = [CNN, *(f"configs/{file}.py" for file in (*BEFORE.get(name, []), name))]
    train_in(tmp_path, stack, [*SETTINGS, f"train.check_replicas_every={every}", *also])
    summary = summary_of(tmp_path)
    assert 0 < summary["wire_over_dense"] < 1.0 and math.isfinite(summary["best"]["acc/test_top1"])


def test_the_log_shows_once_which_parameters_are_of_muon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = "dataset.characters=20000 task.context=16 task.steps_per_epoch=1 model.width=32 model.layers=1"
    settings += " train.num_epochs=1 train.batch_size=2 train.scheduler.warmup_steps=0 train.checkpoint_every=null"
    train_in(tmp_path, ["configs/pysource/gpt.py", "configs/muon/muon.py"], settings.split())
    assert capsys.readouterr().out.count("optimizer  reason") == 1


@pytest.mark.filterwarnings("ignore:PowerSGDCompressor loses")
@pytest.mark.parametrize("name", ["muon", "owners", "fourbit", "powersgd", "ef21", "muloco", "local"])
def test_muon_trains(name: str, tmp_path: Path) -> None:
    stack = ["configs/pysource/gpt.py", f"configs/muon/{name}.py"]
    settings = "dataset.characters=20000 task.context=16 task.steps_per_epoch=4 model.width=32 model.layers=1"
    settings += " train.num_epochs=2 train.batch_size=2 train.scheduler.warmup_steps=2 train.checkpoint_every=null"
    settings += " train.optimizer.ns_precision=fp32 data.num_threads_per_worker=1 train."
    settings += "local.average_every=2" if name in ("muloco", "local") else "check_replicas_every=1"
    train_in(tmp_path, stack, settings.split())
    summary = summary_of(tmp_path)
    assert (summary["wire_over_dense"] == 1) == (name == "muon")
    assert math.isfinite(summary["best"]["bits_per_character/test"])
    groups = saved(tmp_path)["shared"]["optimizer"]["param_groups"]
    assert [(group["muon"], group.get("parts")) for group in groups] == [(False, None), (True, 3), (True, 1)]


def stack_on_gpt(*names: str) -> Any:
    return load([Path("configs/pysource/gpt.py"), *(CONFIGS / f"{name}.py" for name in names)]).train


@pytest.mark.parametrize("name", ["local/twobit", "local/momentum", "local/streaming"])
def test_a_file_of_local_steps_stands_before_or_after_muon(name: str) -> None:
    first, last = stack_on_gpt(name, "muon/local"), stack_on_gpt("muon/local", name)
    assert (first.optimizer, first.local) == (last.optimizer, last.local) or name == "local/streaming"
    assert (first.local.delay, first.local.outer) == (2 if name == "local/streaming" else 0, None)


def test_the_file_of_machines_takes_the_local_steps_before_it() -> None:
    machines = stack_on_gpt("muon/local", "local/momentum", "local/machines").local
    assert machines.base == stack_on_gpt("local/momentum", "muon/local").local


def test_local_steps_of_muon_take_the_gossip_before_them() -> None:
    assert stack_on_gpt("gossip/sgp", "muon/local").local.base._target_ == "dgc.gossip.SGP"


def test_the_table_of_epochs_has_the_bytes_of_all_steps(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    """Not only of those since the last point, between whose exchanges nothing may be sent."""
    words = "train.num_epochs=2 train.log_every=2 train.local.average_every=3"
    train_in(tmp_path, [CNN, "configs/local/local_sgd.py"], [*SETTINGS, *words.split()])
    assert re.findall(r" (\S+)% ", capsys.readouterr().out) == ["25", "25"]  # one exchange in four steps


def test_a_resumed_muon_has_the_settings_of_its_config() -> None:
    groups: list[Any] = [{"params": [torch.ones(2, 2)], "muon": True}, {"params": [torch.ones(2)]}]
    saved = MuonWithAdamW(groups).state_dict()
    schedule: Any = Mock(may_change=Mock(return_value=False))
    check_hyperparameters(saved, MuonWithAdamW(groups, lr=1.0), schedule)
    for place, changes in (("0.momentum", {"momentum": 0.5}), ("1.betas", {"betas": (0.9, 0.9)})):
        with pytest.raises(ValueError, match=rf"param_groups\.{place} is .*, and .* in the config"):
            check_hyperparameters(saved, MuonWithAdamW(groups, **changes), schedule)


@pytest.mark.parametrize("names", GOSSIP, ids="+".join)
def test_gossip_trains(names: Any, tmp_path: Path) -> None:
    also = ["train.batch_size=90", "train.log_every=2"]
    also += ["train.gossip.graph.local_size=2"] if "topology/hierarchical" in names else []
    train_in(tmp_path, [CNN, *(f"configs/{name}.py" for name in names)], [*SETTINGS, *also], size=4)
    summary = summary_of(tmp_path)
    assert summary["dropped_steps"] == 0 and math.isfinite(summary["best"]["acc/test_top1"])


@pytest.mark.parametrize("name", names("topology"))
def test_every_graph_takes_the_number_of_ranks(name: str) -> None:
    words = ["--configs.train.gossip.graph.local_size=2"] if name == "topology/hierarchical" else []
    gossip = load([CNN, "configs/gossip/sgp.py", f"configs/{name}.py"], words).train.gossip
    for graph in (gossip.graph, *(gossip.graph_from_epoch or {}).values()):
        assert graph is None or instantiate(graph)(4).size == 4


def test_momentum_is_not_clipped(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Of 12 steps, the gradients of the first 6 are."""
    clip = Mock(wraps=torch.nn.utils.clip_grad_norm_)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    settings = "num_epochs=1 warmup_lr_epochs=0 batch_size=128 optimizer.freeze_step=6 clip_norm=0.5".split()
    train_in(tmp_path, [CNN, ONEBIT_ADAM], [f"train.{word}" for word in settings], size=1)
    assert [call.args[1] for call in clip.call_args_list] == [0.5] * 6
    (group,) = saved(tmp_path)["shared"]["optimizer"]["param_groups"]
    assert group["steps"] == 12 and group["freeze_step"] == 6
    # another freeze_step is another run
    trees = [load([CNN, ONEBIT_ADAM], [f"--configs.train.optimizer.freeze_step={step}"]) for step in (6, 5)]
    assert config_differences(*map(to_yaml, trees)) == ["  train.optimizer.freeze_step: 6 -> 5"]
    # an experiment with Adam keeps its settings
    expected = dict(load([GPT]).train.optimizer)
    assert dict(load([GPT, ADAM]).train.optimizer) == expected
    found = dict(load([GPT, "configs/adam/dgc_adam.py"]).train.optimizer)
    assert found == {**expected, "_target_": "dgc.optim.DGCAdam", "freeze_step": 100}
    for more in ([], *([f"configs/quant/{name}.py"] for name in ("scaled_sign", "int4", "qsgd"))):
        assert load([CNN, ADAM, *more]).train.optimizer._target_ == "torch.optim.AdamW"


def test_auto_is_on_with_several_machines(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    stack, quick = [CNN, "configs/dgc/wm0.py"], [*SETTINGS, "train.check_replicas_every=1", "model.width=4"]
    quick += ["train.batch_size=64", "train.checkpoint_every=3"]
    train_in(tmp_path / "two", stack, quick, size=4, local_size=2)
    assert "gradients are compressed between 2 machines, and dense inside them" in capsys.readouterr().out
    train_in(tmp_path / "one", stack, quick, size=2, local_size=2)
    assert "between 2 machines" not in capsys.readouterr().out
    summary = summary_of(tmp_path / "two")
    assert 0 < summary["cross_wire_bytes"] < summary["dense_cross_wire_bytes"] / 2
    assert summary["cross_wire_bytes"] < summary["wire_bytes"]
    connect = Mock()
    for word, asked in (("auto", "auto"), ("on", True), ("off", False)):
        settings = load(stack, [f"--configs.train.hierarchical={word}"]).train
        open_transport(settings, build_method(settings), connect)
        assert connect.call_args.kwargs["hierarchical"] == asked


@pytest.fixture(scope="module")
def gossip_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four epochs of SGP on 4 ranks."""
    folder = tmp_path_factory.mktemp("gossip")
    train_in(folder, [CNN, SGP], [*QUICK, "train.num_epochs=4"], size=4)
    return folder


def test_a_run_of_gossip_learns(gossip_run: Path) -> None:
    assert summary_of(gossip_run)["best"]["acc/test_top1"] > 60


@pytest.mark.parametrize("rank", range(4))
def test_a_run_of_gossip_logs_rows_of_each_rank(gossip_run: Path, rank: int) -> None:
    summary = summary_of(gossip_run)
    rows = list(csv.DictReader((gossip_run / "csv" / f"out_r{rank}_n4.csv").read_text().splitlines()[4:]))
    trained = [row for row in rows if row["itr"] != "-1"]
    assert [row["Epoch"] for row in rows if row["itr"] == "-1"] == ["0", "1", "2", "3"]
    assert float(trained[-1]["weight"]) == 1.0 and float(rows[-1]["consensus"]) > 0
    assert sum(float(row["payload_bytes"]) for row in rows) == pytest.approx(summary["payload_bytes"])
    assert float(rows[-1]["val"]) == pytest.approx(summary["final"]["acc/test_top1"], abs=1e-3)


@pytest.mark.parametrize("first", ["all_reduce_first", "two_peers_first"])
def test_the_topology_changes_during_a_run(first: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    sooner = tmp_path / "sooner.py"
    text = "from dgc_training.config import configs\nswitch = configs.train.gossip.graph_from_epoch\n"
    sooner.write_text(text + "switch['2'] = switch.pop('30')\n")
    distances, end = [], train.Log.end_epoch

    def end_epoch(log: Any, *results: Any) -> None:
        distances.append(log.optimizer.consensus_distance)
        end(log, *results)

    monkeypatch.setattr(train.Log, "end_epoch", end_epoch)
    settings = [*QUICK, "train.recorder=null", "train.num_epochs=4"]
    train_in(tmp_path / "run", [CNN, SGP, f"configs/topology/{first}.py", sooner], settings, size=4)
    assert summary_of(tmp_path / "run")["best"]["acc/test_top1"] > 60
    assert first != "all_reduce_first" or max(distances[:8]) < 1e-4 < min(distances[8:])


def test_ranks_save_their_models_beside_the_mean(tmp_path: Path) -> None:
    train_in(tmp_path, [CNN, OSGP], QUICK)
    files = saved(tmp_path)
    own = [files[f"rank{rank}"]["compression"] for rank in range(2)]
    (name,) = [key for key in own[0] if key.startswith("OSGP")]
    models, shared = [part[name]["z"] for part in own], files["shared"]["model"].items()
    mean = torch.cat([value.flatten() for key, value in shared if "running" not in key and "num_" not in key])
    assert not torch.equal(*models) and float((sum(models) / 2 - mean).abs().max()) < 1e-6
    assert not torch.equal(*(part["optimizer"]["state"][0]["momentum_buffer"] for part in own))


def test_the_learning_rate_follows_the_number_of_ranks(tmp_path: Path) -> None:
    """Each rank's own optimizer state has the rate for the old number."""
    settings = [*QUICK, "train.scheduler=null", "train.warmup_lr_epochs=0", "train.optimizer.lr=0.01"]
    settings += ["train.checkpoint_every=3", "train.recorder=null"]
    train_in(tmp_path / "run", [CNN, SGP], settings)
    again = rewound(tmp_path / "run", tmp_path / "again", "e0001s00003")
    with pytest.warns(UserWarning, match="saved by 2 ranks and is resumed by 3"):
        train_in(again, [CNN, SGP], settings, size=3)
    files = saved(again)
    own = [files[f"rank{rank}"]["compression"]["optimizer"] for rank in range(3)]
    groups = [group for state in (files["shared"]["optimizer"], *own) for group in state["param_groups"]]
    assert [group["lr"] for group in groups] == pytest.approx([3 * 0.01] * 4)


def test_a_signal_stops_all_ranks_some_steps_later(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    steps, begin = [], Interruption.begin_step

    def begin_step(interruption: Any) -> None:
        if interruption.transport.rank == 1:
            steps.append(1)
            interruption.received = signal.SIGUSR1 if len(steps) == 3 else interruption.received
        begin(interruption)

    monkeypatch.setattr(Interruption, "begin_step", begin_step)
    assert train_in(tmp_path, [CNN, SGP], [*QUICK, "train.batch_size=20"]) == [75, 75]
    assert (tmp_path / "checkpoints" / "e0000s00019").exists()


def test_local_steps_have_a_key_of_their_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("train: {gossip: {_target_: dgc.local.OuterSteps}}")
    with pytest.raises(ConfigError, match=r"train.gossip is dgc.local.OuterSteps, which belongs to train.local"):
        require_complete(load([CNN, mine], []), "cpu")


@pytest.mark.parametrize("stack", [["configs/local/slowmo.py", SGP], [SGP, "configs/local/slowmo.py"]])
def test_local_steps_are_over_the_gossip_of_the_stack(stack: list[Any]) -> None:
    method = instantiate(load([CNN, *stack], ["--configs.train.gossip.blocking=true"]).train.local)
    assert method.average_every == 48 and method.base.blocking


@pytest.fixture
def on_cpu(monkeypatch: MonkeyPatch) -> None:
    """The CPU stands in for a GPU."""
    monkeypatch.setattr(stepping, "FP16_DEVICES", ("cuda", "cpu"))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("words", [[], ["train.clip_norm=null"]])
def test_an_overflow_on_a_rank_drops_the_step_on_all(words: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Replicas are compared after each step."""
    calls, dtypes, loss_of = 0, set(), LanguageModel.loss

    def loss(self: Any, model: Any, batch: Any) -> Loss:
        nonlocal calls
        calls += 1
        found = loss_of(self, model, batch)
        dtypes.add(found.outputs.dtype if found.outputs is not None else None)
        # ranks take turns: the sixth call is one rank's third step
        return found._replace(mean=found.mean * 1e36) if calls == 6 else found

    monkeypatch.setattr(LanguageModel, "loss", loss)
    train_in(tmp_path, [GPT], [*FP16, *words])
    assert (calls, dtypes) == (20, {torch.float16})
    assert saved(tmp_path)["shared"]["scaler"]["scale"] == FIRST_SCALE / 2
    assert summary_of(tmp_path)["dropped_steps"] == 1


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:.*use TwoPhaseCompressor")
@pytest.mark.parametrize("stack", [(), ("configs/adam/dgc.py",), ("configs/powersgd/rank2.py",)])
def test_a_resumed_run_has_its_scale(stack: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """The first scale is far too large: every step lowers it, before and after the interruption."""
    monkeypatch.setattr(stepping, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**40))
    train_in(tmp_path / "whole", [GPT, *stack], FP16)
    again = rewound(tmp_path / "whole", tmp_path / "again", "e0001s00002")
    assert FIRST_SCALE < saved(again)["shared"]["scaler"]["scale"] < 2.0**40
    train_in(again, [GPT, *stack], FP16)
    assert_same_end(tmp_path / "whole", again)
    end = saved(again)["shared"]
    assert end["scaler"]["scale"] <= 2.0**36 and end["progress"]["dropped_steps"] > 3


@pytest.mark.usefixtures("on_cpu")
def test_gradients_are_clipped_after_they_are_unscaled(tmp_path: Path) -> None:
    settings = OmegaConf.create({"precision": "fp16", "clip_norm": 0.01, "gossip": None, "local": None})
    device, model = torch.device("cpu"), torch.nn.Linear(3, 1)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    sgd, scaler = torch.optim.SGD(model.parameters(), lr=1.0), stepping.make_scaler(settings, device)
    options: Any = {"transport": LockstepWorld(1).transports[0], "grad_scaler": scaler}
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), DenseCompressor(), **options)
    steps = stepping.Stepping(optimizer, model, settings, device, scaler)
    with steps.autocast():
        loss = 0.1 * model(torch.ones(2, 3)).float().mean()
    steps.backward(loss)
    steps.step()
    moved = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)
    # a run without it has no scale
    train_in(tmp_path, [GPT], [*FP16, "train.precision=bf16", "train.num_epochs=1"], size=1)
    assert "scaler" not in saved(tmp_path)["shared"]
