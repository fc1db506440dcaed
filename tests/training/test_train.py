"""train.py on simulated ranks: a complete run, resuming, evaluation, errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated import train_on
from states import assert_equal

import train
from dgc import kernels
from dgc.comm.lockstep import LockstepWorld
from dgc_training.checkpoint.progress import TrainingProgress
from dgc_training.checkpoint.reading import fingerprint, read_tensors
from dgc_training.config import ConfigError, load
from dgc_training.faults.failure import UsageError
from dgc_training.logging.formatting import result_text
from dgc_training.logging.scalars import OFTEN_ZERO, TAGS, ScalarLog, describe
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.setup import require_complete
from dgc_training.tasks.classification import LabelCheck

EXPERIMENT = ["--configs", "configs/digits/cnn.py", "configs/dgc/wm5.py"]
QUICK = [
    "--configs.train.num_epochs=2",
    "--configs.train.batch_size=64",
    "--configs.train.warmup_lr_epochs=1",
    "--configs.train.checkpoint_every=5",
    "--configs.train.check_replicas_every=4",
    "--configs.data.num_threads_per_worker=1",
    "--configs.model.width=8",
]

# Only the run that several tests share is checked for shapes.
pytestmark = pytest.mark.usefixtures("no_type_checks")
BRIEF = ["--configs.train.num_epochs=1", "--configs.train.checkpoint_every=null"]


def run(words: Any, size: int = 2, experiment: Any = EXPERIMENT) -> None:
    train_on(size, [*experiment, "--devices", "cpu", *QUICK, *words])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run; tests copy it."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    run(["--run-dir", str(directory)])
    return directory


@pytest.fixture
def copy(finished: Any, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_the_files_of_a_run(finished: Any) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["ranks"] == 2 and summary["epochs"] == 2
    assert summary["samples"] == 2 * (11 * 64 + 15) * 2
    assert summary["best"]["acc/test_top1"] > 50
    assert summary["wire_over_dense"] == pytest.approx(summary["wire_bytes"] / summary["dense_wire_bytes"])
    assert summary["wire_over_dense"] < 0.9
    names = sorted(path.name for path in (finished / "checkpoints").iterdir() if path.is_dir())
    assert "e0002" in names and len(names) in (3, 4)
    assert (finished / "config.yaml").exists()
    best = json.loads((finished / "checkpoints" / "best.json").read_text())["checkpoint"]
    assert best == f"e000{summary['best_epoch']}"


def test_the_rate_is_scaled_by_the_ranks(finished: Any) -> None:
    """After the warm-up of one epoch."""
    (group,) = read_tensors(finished / "checkpoints" / "e0002" / "shared.pt")["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(2 * 0.025)


def test_ranks_draw_different_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(train, "seed_everything", seeds.append)
    with pytest.raises(ValueError, match="not a result"):  # told after all parts have been built
        run(["--run-dir", str(tmp_path / "run"), "--configs.train.metric=acc/val_top1"], size=3)
    assert len(seeds) == 3 and len(set(seeds)) == 3


def test_scalars(finished: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished)).Reload()
    tags = set(events.Tags()["scalars"])
    results = {"acc/test_top1", "acc/test_top5"}
    # One machine; sparse costs less. Of the phases, waiting may be 0: simulated ranks hand over replies directly.
    always_0 = {"bytes/cross_wire_per_step", "compression/dense_share", "time/wait"} - ({"time/wait"} & tags)
    of_models = {tag for tag in TAGS if tag.startswith(("gossip/", "local/"))}
    assert TAGS.keys() - of_models - {"time/tokens_per_second"} - always_0 == tags - results
    assert events.summary_metadata["train/lr"].summary_description == describe("train/lr")
    assert "samples seen" in describe("train/lr") and "train.meters" in describe("acc/test_top1")
    phases = ("data", "forward_backward", "compress", "launch", "decode", "step")
    assert {f"time/{phase}" for phase in phases} <= tags
    accuracy = events.Scalars("acc/test_top1")
    assert [point.step for point in accuracy] == [1438, 2876]
    assert [point.step for point in events.Scalars("train/loss")] == [1280, 1438, 2718, 2876]
    dense = events.Scalars("bytes/dense_wire_per_step")[0].value  # 2 ranks: once the payload
    assert dense == 4 * sum(p.numel() for p in __import__("dgc_models").DigitsCNN(width=8).parameters())


def test_a_tag_that_is_always_0_is_not_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = ScalarLog(tmp_path, LockstepWorld(1).transports[0], samples=0, lag=0)
    for point, error in enumerate((0.0, 0.0, 3.0, 0.0)):
        values = {
            "bytes/wire_per_step": 0.0,
            "compression/error_norm": error,
            "acc/test_top1": 0.0,
            "bytes/wire": 0.0,
        }
        log.write(values, 10 * point)
    log.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["acc/test_top1", "bytes/wire", "compression/error_norm"]
    found = [(point.step, point.value) for point in events.Scalars("compression/error_norm")]
    assert found == [(0, 0.0), (10, 0.0), (20, 3.0), (30, 0.0)]
    described = events.summary_metadata["compression/error_norm"].summary_description
    assert described == describe("compression/error_norm") and OFTEN_ZERO < TAGS.keys()


def test_tensorboard_has_the_settings(finished: Any) -> None:
    """The config as text, and as hyperparameters of the HParams page."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(finished)).Reload()
    assert b"    compress_ratio: 0.001" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["ranks"].number_value == 2 and settings["train.batch_size"].number_value == 64
    assert settings["train.compression.compress_ratio"].number_value == 0.001


def test_a_traced_run_has_a_timeline_of_each_rank(tmp_path: Path) -> None:
    run(["--run-dir", str(tmp_path / "run"), "--configs.train.trace", "True", "--configs.train.num_epochs", "1"])
    for rank in range(2):
        events = json.loads((tmp_path / "run" / "trace" / f"rank{rank}.json").read_text())["traceEvents"]
        rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert "training" in rows and any(row.endswith("(network)") for row in rows)
        phases = {event["name"] for event in events if event["ph"] == "X"}
        assert {"data", "forward_backward", "compress", "launch", "decode", "step", "in flight"} <= phases


def test_a_run_prints_its_kernels_and_uses_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_asked", "auto")
    run(["--run-dir", str(tmp_path / "run"), "--configs.train.kernels", "reference", *BRIEF])
    assert "reference (plain PyTorch)" in capsys.readouterr().out
    assert kernels.describe(torch.device("cpu")) == "reference (plain PyTorch)"


def test_unavailable_kernels_are_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "_asked", "auto")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels._backend.cache_clear()  # tests of the Triton backend fill it
    for name, words in (("triton", "run on a GPU"), ("fast", "auto, reference, native, triton")):
        with pytest.raises(ConfigError, match=words):
            run(["--run-dir", str(tmp_path / "run"), "--configs.train.kernels", name])


def without_identities(folder: Path) -> None:
    """Give the files of ranks the form of versions that did not save whose state they are."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for rank in range(manifest["size"]):
        path = folder / f"rank{rank}.pt"
        own = read_tensors(path)
        assert own["compression"].pop("identity")["rank"] == rank
        torch.save(own, path)
        manifest["files"][path.name] = fingerprint(path)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("start", ["e0001s00005", "e0001s00010", "e0001s00010 of an earlier version"])
def test_a_run_resumed_in_mid_epoch_ends_bit_identical(copy: Any, start: Any) -> None:
    checkpoints = copy / "checkpoints"
    start, *is_old = start.split(" ", 1)
    if is_old:
        without_identities(checkpoints / start)
    last = [read_tensors(checkpoints / "e0002" / name) for name in ("shared.pt", "rank0.pt", "rank1.pt")]
    shutil.rmtree(checkpoints / "e0002")
    (checkpoints / "latest.json").write_text(json.dumps({"checkpoint": start}))
    torch.manual_seed(12345)
    run(["--run-dir", str(copy)])
    for name, expected in zip(("shared.pt", "rank0.pt", "rank1.pt"), last, strict=True):
        again = read_tensors(checkpoints / "e0002" / name)
        # Simulated ranks are threads of one process and share its random generators.
        for state in (expected, again):
            state.pop("random", None)
            if is_old and "compression" in state:
                del state["compression"]["identity"]  # its step counts from here
        assert_equal(expected, again)


def test_a_finished_run_is_not_run_again(copy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*.pt")}
    run(["--run-dir", str(copy)])
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*.pt")} == before
    assert "resumed from checkpoint e0002. The run is finished" in capsys.readouterr().out


@pytest.mark.parametrize("size", [1, 2, 3])
def test_evaluate_gives_the_reported_accuracy_on_any_number_of_ranks(
    copy: Any, capsys: pytest.CaptureFixture[str], size: Any
) -> None:
    best = json.loads((copy / "summary.json").read_text())["best"]
    run(["--run-dir", str(copy), "--evaluate"], size)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name} {result_text(value)}" for name, value in best.items()]


SCHEDULES = {
    "multistep right after a milestone": ["_target_=torch.optim.lr_scheduler.MultiStepLR", "milestones=[1]"],
    "one cycle, per step": [
        "_target_=torch.optim.lr_scheduler.OneCycleLR",
        "max_lr=0.2",
        "total_steps=40",
        "cycle_momentum=false",
    ],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_resumed_with_accumulation_and_any_schedule(tmp_path: Path, name: Any) -> None:
    """2 passes per step. Resumed after an epoch, right after the milestone, and in mid-epoch."""
    target, *keywords = SCHEDULES[name]
    (tmp_path / "schedule.yaml").write_text(
        "train: {scheduler: {" + ", ".join(word.replace("=", ": ") for word in (target, *keywords)) + "}}"
    )
    words = ["--configs", "configs/digits/cnn.py", "configs/dgc/wm5.py", str(tmp_path / "schedule.yaml")]
    words += [f"--configs.train.{word}" for word in ("num_batches_per_step=2", "warmup_lr_epochs=0")]
    words += ["--configs.train.checkpoint_every=2", "--configs.train.num_epochs=3"]
    words += [f"--configs.train.schedule_lr_per_epoch={'step' not in name.split()}"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(["--run-dir", str(whole), *words])
    shutil.copytree(whole, parts)
    for start in ("e0002", "e0002s00002", "e0002s00004"):
        if not (parts / "checkpoints" / start).exists():
            continue
        shutil.rmtree(parts)
        shutil.copytree(whole, parts)
        shutil.rmtree(parts / "checkpoints" / "e0003")
        (parts / "checkpoints" / "latest.json").write_text(json.dumps({"checkpoint": start}))
        run(["--run-dir", str(parts), *words])
        for file in ("shared.pt", "rank0.pt", "rank1.pt"):
            states = [read_tensors(side / "checkpoints" / "e0003" / file) for side in (whole, parts)]
            for state in states:
                state.pop("random", None)
            assert_equal(*states)


def test_resuming_on_another_number_of_ranks_warns(copy: Any) -> None:
    (copy / "checkpoints" / "latest.json").write_text(json.dumps({"checkpoint": "e0001s00005"}))
    with pytest.warns(UserWarning, match="saved by 2 ranks and is resumed by 3: .* mean over the ranks"):
        run(["--run-dir", str(copy)], size=3)
    summary = json.loads((copy / "summary.json").read_text())
    # 5 steps of 2 ranks are 3 steps of 3 ranks. The rest of the epoch follows.
    assert summary["ranks"] == 3 and summary["samples"] == 1438 + 5 * 64 * 2 + (479 - 3 * 64) * 3


def test_another_config_is_an_error_and_nothing_is_overwritten(copy: Any) -> None:
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"train\.optimizer\.lr: 0\.025 -> 0\.5(.|\n)*--suffix"):
        run(["--run-dir", str(copy), "--configs.train.optimizer.lr=0.5"])
    with pytest.raises(UsageError, match=rf"train\.optimizer\.lr(.|\n)*{copy}/config.yaml --run-dir {copy}"):
        run(["--run-dir", str(copy), "--evaluate", "--configs.train.optimizer.lr=0.5"])
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def update_manifest(folder: Any, name: Any) -> None:
    """Enters a changed file into the manifest."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = fingerprint(folder / name)
    path.write_text(json.dumps(manifest))


FOREIGN = {
    "an epoch that is no number": (lambda s: s["progress"].update(epoch=float("inf")), r"progress\.epoch is inf"),
    "a buffer that is text": (
        lambda s: s["optimizer"]["state"][0].update(momentum_buffer="x"),
        r"optimizer\.state\.0\.momentum_buffer is of type str",
    ),
    "a state of a group": (lambda s: s["optimizer"]["state"].update({4: None}), r"optimizer\.state\.4 is not"),
    "a buffer of another shape": (
        lambda s: s["optimizer"]["state"][0].update(momentum_buffer=torch.zeros(3)),
        r"momentum_buffer is not a tensor of shape",
    ),
    "a group without a rate": (lambda s: s["optimizer"]["param_groups"][0].pop("lr"), r"param_groups\.0 is"),
    "another schedule": (lambda s: s["schedule"]["scheduler"].pop("T_max"), r"schedule\.scheduler is"),
    "another model": (lambda s: s["model"].popitem(), "Missing key"),
    "nothing": (lambda s: s.clear(), "KeyError"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_checkpoint_that_does_not_fit_is_one_error_on_every_rank(copy: Any, what: Any) -> None:
    change, message = FOREIGN[what]
    folder = copy / "checkpoints" / "e0002"
    shared = read_tensors(folder / "shared.pt")
    change(shared)
    torch.save(shared, folder / "shared.pt")
    update_manifest(folder, "shared.pt")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=rf"e0002 does not fit this run \(rank 0\): (.|\n)*{message}"):
        run(["--run-dir", str(copy)])
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_a_foreign_file_of_one_rank_is_reported_with_the_rank(copy: Any) -> None:
    folder = copy / "checkpoints" / "e0002"
    torch.save({"compression": {}, "batch_norm": {"other": 1}, "random": {}}, folder / "rank1.pt")
    update_manifest(folder, "rank1.pt")
    with pytest.raises(UsageError, match=r"this run \(rank 1\): rank1\.pt: ValueError: batch_norm is \['other'\]"):
        run(["--run-dir", str(copy)])


def test_nonfinite_values_and_other_types_are_errors(tmp_path: Path) -> None:
    """The error has file, name and remedy. Without it every step would be dropped."""
    nan, inf = float("nan"), float("inf")

    def poison(tensor: Any) -> None:
        tensor.view(-1)[-1] = nan

    def error_of(own: Any, *path: Any) -> None:
        state = own["compression"]
        for key in path:
            state = state[key]
        poison(next(iter(state.values())))

    def double(own: Any) -> None:
        errors = own["compression"]["PowerSGDCompressor.0"]["errors"]
        errors.update({name: error.double() for name, error in errors.items()})

    def narrow(shared: Any) -> None:
        buffers = shared["optimizer"]["state"][0]
        buffers[buffer] = buffers[buffer].to(torch.int8)

    def group(**values: Any) -> Any:
        return lambda s: s["optimizer"]["param_groups"][0].update(values)

    onebit, powersgd, osgp = "configs/quant/onebit.py", "configs/powersgd/rank4.py", "configs/gossip/osgp.py"
    weight, bias = "classifier.2.weight", "classifier.2.bias"
    dgc, buffer = "configs/dgc/wm5.py", "momentum_buffer"
    cases = [
        (dgc, "shared", lambda s: poison(s["model"][weight]), rf"shared\.pt.*{weight} has NaN"),
        (dgc, "shared", lambda s: s["model"].update({bias: s["model"][bias].double()}), f"{bias} is not .*32"),
        (dgc, "shared", lambda s: poison(s["optimizer"]["state"][0][buffer]), rf"state\.0\.{buffer} has NaN"),
        (dgc, "shared", narrow, rf"state\.0\.{buffer} is not a tensor of shape .* and type torch.float32"),
        (dgc, "shared", group(momentum=0.5), r"param_groups\.0\.momentum is 0\.5, and 0\.9 in the config"),
        (dgc, "shared", group(lr=inf), r"param_groups\.0\.lr is inf"),
        (dgc, "shared", lambda s: s["progress"].update(samples=2**80), rf"progress\.samples is {2**80}"),
        (
            dgc,
            "rank1",
            lambda s: error_of(s, "DGCCompressor.0", "velocities"),
            r"\(rank 1\): rank1\.pt: .* velocities of \S+ has NaN",
        ),
        (onebit, "rank0", lambda s: error_of(s, "OneBitCompressor.0", "errors"), "errors of .* has NaN"),
        (powersgd, "rank0", double, "errors of .* has type torch.float64, not torch.float32"),
        (powersgd, "rank1", lambda s: error_of(s, "PowerSGDCompressor.0", "Q"), "Q of .* has NaN"),
        (osgp, "rank0", lambda s: poison(s["compression"]["OSGP.0"]["z"]), "z has NaN"),
        (
            osgp,
            "rank0",
            lambda s: poison(s["compression"]["optimizer"]["state"][0][buffer]),
            rf"rank0\.pt: .*{buffer} has NaN",
        ),
    ]
    made = {}
    for number, (method, file, damage, message) in enumerate(cases):
        words = ["--configs", "configs/digits/cnn.py", method, "--configs.train.check_replicas_every=0", *BRIEF]
        words.append("--configs.train.batch_size=400")
        if method not in made:
            made[method] = tmp_path / f"made{number}"
            run([*words, "--run-dir", str(made[method])], experiment=())
        copied = shutil.copytree(made[method], tmp_path / f"copy{number}")
        folder = copied / "checkpoints" / "e0001"
        content = read_tensors(folder / f"{file}.pt")
        damage(content)
        torch.save(content, folder / f"{file}.pt")
        update_manifest(folder, f"{file}.pt")
        cure = r"(.|\n)*latest\.json\. --no-resume"
        with pytest.raises(UsageError, match=rf"e0001 does not fit this run (.|\n)*{message}{cure}"):
            run([*words, "--run-dir", str(copied)], experiment=())


@pytest.mark.parametrize("damage", [b"a: [", b"\x00\x1a", b"\xff\xfe\xfa", b"  a: 1\nb: 2\n"])
def test_a_damaged_config_of_the_run_is_an_error(copy: Any, damage: Any) -> None:
    (copy / "config.yaml").write_bytes(damage)
    with pytest.raises(UsageError, match=r"config\.yaml is damaged .* --no-resume"):
        run(["--run-dir", str(copy)])
    assert (copy / "config.yaml").read_bytes() == damage


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.width=0", r"model \(dgc_models\.DigitsCNN\): width must be at least 1, not 0"),
        ("model.num_classes=-3", r"model \(dgc_models\.DigitsCNN\): num_classes must be at least 1, not -3"),
        ("train.optimizer.lr=1e308", "the learning rate is .*e[+]308, which is not a finite fp32 number"),
        ("train.batch_size=1180591620717411303424", r"train\.batch_size is 1180\d+; it must .* most 2147483647"),
        ("train.num_batches_per_step=2000", r"the training set has 1437 samples, too few for one step"),
        ("seed=1000000000000000000000", r"seed is 10{21}; its magnitude must be less than 2\*\*62"),
    ],
)
def test_impossible_values_give_one_line(tmp_path: Path, word: Any, message: Any) -> None:
    words = [*EXPERIMENT, "--devices", "cpu", *QUICK, f"--configs.{word}"]
    with pytest.raises(ConfigError, match=message) as raised:
        args, overrides = parse_arguments([*words, "--run-dir", str(tmp_path / "run")])
        tree = load(args.configs, overrides)
        require_complete(tree, "cpu")
        LockstepWorld(1).run(lambda transport: train.run(args, tree, transport))
    assert "\n" not in str(raised.value) and list(tmp_path.iterdir()) == []


def test_labels_outside_of_the_outputs_give_one_line(tmp_path: Path) -> None:
    """At the first batch with such a label. Labels that the loss ignores are no error."""
    words = ["--run-dir", str(tmp_path / "run"), "--configs.model.num_classes=9", *BRIEF]
    with pytest.raises(ConfigError, match=r"label 9, but model has 9 outputs, for labels from 0 to 8: .*classes"):
        run(words, size=1)
    labels = torch.tensor([0, -100, 8])
    LabelCheck(torch.nn.CrossEntropyLoss())(torch.zeros(3, 9), labels)
    LabelCheck(torch.nn.MSELoss())(torch.zeros(3, 1), torch.tensor([7, 8, 9]))
    with pytest.raises(ConfigError, match="label -1, but model"):
        LabelCheck(torch.nn.CrossEntropyLoss())(torch.zeros(3, 9, 4), labels.clamp(min=-1).view(3, 1))


def test_a_config_that_raises_keyboard_interrupt_has_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stop.py").write_text("raise KeyboardInterrupt\n")
    assert train.main(["--configs", str(tmp_path / "stop.py")]) == 130
    assert capsys.readouterr().err.startswith("Stopped by Ctrl-C")


def test_settings_without_effect_on_the_result_may_change(
    copy: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_asked", "auto")
    free = ["train.bucket_mb=1", "train.log_every=3", "train.trace=True", "train.kernels=reference"]
    run(["--run-dir", str(copy), *(f"--configs.{setting}" for setting in free)])
    assert "resumed" in capsys.readouterr().out


def test_no_resume_moves_the_earlier_run_aside(copy: Any) -> None:
    before = (copy / "summary.json").read_bytes()
    run(["--run-dir", str(copy), "--no-resume", "--configs.train.num_epochs=1"])
    assert (copy.with_name("run.1") / "summary.json").read_bytes() == before
    assert json.loads((copy / "summary.json").read_text())["epochs"] == 1


def test_a_damaged_best_json_is_an_error_before_training(copy: Any) -> None:
    (copy / "checkpoints" / "best.json").write_text("{")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"best\.json cannot be read"):
        run(["--run-dir", str(copy)])
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_files_of_several_configs_options_stack(capsys: pytest.CaptureFixture[str]) -> None:
    args, _ = parse_arguments(["--configs", "a.py", "b.py", "--suffix", ".x", "--configs", "c.py"])
    assert args.configs == ["a.py", "b.py", "c.py"]
    with pytest.raises(SystemExit):
        parse_arguments(["--configs", "a.py", "--evaluate", "--no-resume"])


def test_any_number_is_better_than_nan() -> None:
    progress, nan = TrainingProgress(), float("nan")
    seen = []
    for epoch, value in enumerate((nan, 80.0, nan, 90.0, 90.0, 85.0), start=1):
        progress.epoch = epoch
        seen.append(progress.add_results({"m": value}, "m"))
    assert seen == [True, True, False, True, False, False]
    assert progress.best == {"m": 90.0} and progress.best_epoch == 4


def test_evaluate_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint in .*nothing/checkpoints. Train first"):
        run(["--run-dir", str(tmp_path / "nothing"), "--evaluate"])
    assert list(tmp_path.iterdir()) == []


def test_optional_parts_are_optional(tmp_path: Path) -> None:
    """No scheduler, no warm-up, no metric; with accumulation and a separate group for batch norm."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ["train.scheduler=null", "train.warmup_lr_epochs=0", "train.metric=null", "train.num_epochs=1"]
    words += [
        "train.num_batches_per_step=2",
        "train.optimize_bn_separately=true",
        "train.checkpoint_every=null",
    ]
    run(["--run-dir", str(tmp_path / "run"), *(f"--configs.{word}" for word in words)])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["best"] == {} and summary["metric"] is None and summary["samples"] == 5 * 2 * 2 * 64
    (loss,) = EventAccumulator(str(tmp_path / "run")).Reload().Scalars("train/loss")
    assert loss.value < 3  # the mean of both passes: about ln 10, that of a guess
    assert not (tmp_path / "run" / "checkpoints" / "best.json").exists()
    run(["--run-dir", str(tmp_path / "run"), "--evaluate", *(f"--configs.{word}" for word in words)])


def test_an_unknown_metric_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="'acc/val_top1' is not a result; there are: acc/test_top1, acc/test_top5"
    ):
        run(["--run-dir", str(tmp_path / "run"), "--configs.train.metric=acc/val_top1"])
    assert list(tmp_path.iterdir()) == []


def test_print_config_prints_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main([*EXPERIMENT, "--print-config", "--configs.train.num_epochs", "500"]) == 0
    assert "num_epochs: 500" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [["--config", "x"], ["--configs.train.num_epoch", "5"], ["stray.py"], ["--eval"]]
)
def test_wrong_arguments_are_errors_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main([*EXPERIMENT, "--devices", "cpu", *words]) == 2
    assert words[0] in capsys.readouterr().err or words[0].removeprefix("--configs.") in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main([*EXPERIMENT, "--devices", "gpu"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ranks_with_other_configs_are_reported(tmp_path: Path) -> None:
    def body(transport: Any) -> None:
        args, _ = parse_arguments([*EXPERIMENT, "--devices", "cpu", "--run-dir", str(tmp_path)])
        train.run(args, trees[transport.rank // 2], transport)

    trees = [load(EXPERIMENT[1:], [*QUICK, f"--configs.seed={seed}"]) for seed in (0, 1)]
    with pytest.raises(UsageError, match=r"rank 2 has another config than rank 0(.|\n)*seed: 0 -> 1"):
        LockstepWorld(3).run(body)


def test_the_saved_config_repeats_the_run(finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args, _ = parse_arguments(["--configs", str(finished / "config.yaml"), "--devices", "cpu"])
    tree = load(args.configs, [])
    LockstepWorld(2).run(lambda transport: train.run(args, tree, transport))
    again = json.loads((tmp_path / "runs" / "run.repeat.np2" / "summary.json").read_text())
    before = json.loads((finished / "summary.json").read_text())
    for key in ("samples", "epochs", "payload_bytes", "wire_bytes", "dense_wire_bytes"):
        assert again[key] == before[key]


def test_wrong_options_print_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        train.main(["--devices", "tpu"])
    assert leaving.value.code == 2 and "usage: train.py" in capsys.readouterr().err
