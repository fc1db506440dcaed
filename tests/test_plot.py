"""The plots: values read from the CSV files, errors, colours and files."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from cases import case

from scripts.gossip.csv_runs import read_run
from scripts.gossip.rank_csv import CsvLog
from scripts.plot import main
from scripts.plot_figures import bytes_figure, colours, error_figure, loss_figure, names, scaling_figure, time_unit
from scripts.plot_runs import check_comparable
from scripts.run_files import PlotError

CONFIG = {"dataset": {"_target_": "dgc_datasets.Digits"}, "model": {"_target_": "dgc_models.DigitsCNN"}}
STEPS = 6


def write_run(
    directory: Path,
    target: str | None = "dgc.gossip.SGP",
    ranks: int = 2,
    batch: int = 32,
    compression: str = "Dense",
    **other: str,
) -> Path:
    """Rank r takes 1 + r seconds per step, 10 for the first. Accuracy: 50, 60, ... %; in validation 2 r more."""
    gossip = {"gossip": {"_target_": target} if target else None}
    train = {**gossip, "compression": {"_target_": f"dgc.compression.{compression}Compressor"}}
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **other, "train": train}))
    for rank in range(ranks):
        log = CsvLog(directory, rank=rank, size=ranks, batch_size=batch, every=4, ignore=2)
        for epoch, accuracy in enumerate((50.0, 60.0, 70.0)):
            for itr in range(STEPS):
                seconds = 10.0 if (epoch, itr) == (0, 0) else 1.0 + rank
                sent = {"wire_bytes": 1000.0 * ranks}
                log.step(epoch, itr, seconds, 0.0, 3.0 - epoch + rank, accuracy, 90.0, batch, sent)
            log.end_epoch(epoch, accuracy + 2 * rank)
        log.close()
    return directory


def drawn(make: Any, *given: Any) -> Any:
    figure = make(*given)
    assert figure is not None
    return figure


def ydata(line: Any) -> list[float]:
    return np.asarray(line.get_ydata()).tolist()


def xdata(line: Any) -> list[float]:
    return np.asarray(line.get_xdata()).tolist()


def test_the_values_of_a_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert (run.label, run.ranks, run.batch, run.seconds_per_step) == ("SGP", 2, 32, 1.5)
    assert run.samples_per_second == pytest.approx(2 * 32 / 1.5)
    assert run.training.y == [50.0, 60.0, 70.0] and run.validation.y == [51.0, 61.0, 71.0]
    assert run.training.steps == [6, 12, 18]
    assert run.training.seconds == [(15 + 20) / 2, (21 + 32) / 2, (27 + 44) / 2]
    assert run.validation.wire == [12_000, 24_000, 36_000]
    assert run.loss.steps == [1, 5, 6, 7, 11, 12, 13, 17, 18]
    assert run.loss.y == [3.5] * 3 + [2.5] * 3 + [1.5] * 3
    # killed: the last line of a rank is incomplete; only epochs that all ranks have completed are plotted
    path = tmp_path / "run" / "csv" / "out_r1_n2.csv"
    text = path.read_text()
    for cut in (1, 20, 97):
        path.write_text(text[:-cut])
        run = read_run(tmp_path / "run")
        assert run.training.y == [50.0, 60.0] and len(run.loss.y) == 9, cut
    # the elapsed time of a file with 18 columns, as in the reference, is estimated: each row represents the steps
    # since the previous row
    path = write_run(tmp_path / "alone", ranks=1) / "csv" / "out_r0_n1.csv"
    head, rows = path.read_text().splitlines()[:4], path.read_text().splitlines()[4:]
    path.write_text("\n".join([*head, *(",".join(row.split(",")[:18]) for row in rows)]) + "\n")
    run = read_run(tmp_path / "alone")
    assert run.loss.seconds[:4] == [10.0, 14.0, 15.0, 16.0] and run.validation.y == [50.0, 60.0, 70.0]


def test_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, larger = write_run(tmp_path / "a"), write_run(tmp_path / "b", batch=64)
    options = ["--out", str(tmp_path / "out"), "--formats", "svg"]
    assert main([str(run), str(larger), *options]) == 0
    assert "iterations differ: SGP 32, SGP 64" in capsys.readouterr().err
    (run / "csv" / "out_r1_n2.csv").unlink()
    assert main([str(run), *options]) == 0 and "drawing 1 of 2 ranks" in capsys.readouterr().err
    log = CsvLog(tmp_path / "new", rank=0, size=1, batch_size=32)
    log.step(0, 0, 1.0, 0.0, 2.0, 10.0, 50.0, 32)
    log.close()
    assert main([f"new={tmp_path / 'new'}", *options]) == 0
    output = capsys.readouterr()
    assert "no figure 'error'" in output.err and "no figure 'bytes'" in output.err and output.out.count("svg") == 2


def named(kind: str, **more: Any) -> dict[str, Any]:
    return {"_target_": f"dgc.{kind}", **more}


LABELS: dict[str, dict[str, Any]] = {
    "AR-SGD": {"gossip": None, "compression": named("compression.DenseCompressor")},
    "DGC": {"compression": named("compression.DGCCompressor")},
    "D-PSGD": {"gossip": named("gossip.DPSGD")},
    "AD-PSGD": {"gossip": named("gossip.ADPSGD")},
    "OSGP + PGA": {"gossip": named("gossip.Periodic", base=named("gossip.OSGP"))},
    "local SGD": {"gossip": named("gossip.Periodic", base=None)},
    "local SGD + SlowMo": {"gossip": {"_target_": "Periodic", "base": None, "outer": {"_target_": "a.SlowMo"}}},
    "local SGD + Nesterov + PowerSGD": {
        "gossip": named(
            "local.OuterSteps", outer=named("local.Nesterov"), compression=named("compression.PowerSGDCompressor")
        )
    },
}


def test_labels_names_and_colours(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, ranks=n)) for name, n in (("a", 1), ("b", 2), ("c", 2))]
    assert names(runs[:1]) == ["SGP"] and names(runs[:2]) == ["SGP, 1 rank", "SGP, 2 ranks"]
    assert names(runs)[1:] == ["SGP, 2 ranks (b)", "SGP, 2 ranks (c)"]
    path = tmp_path / "a"
    for label, config in LABELS.items():
        (path / "config.yaml").write_text(yaml.safe_dump({"train": config}))
        assert read_run(path).label == label and read_run(path, "mine").label == "mine"
    found = colours([(name, 0) for name in ("AR-SGD", "D-PSGD", "SGP", "OSGP", "AD-PSGD", "DGC", "DGC")])
    red, green, blue, other_blue, *cycle = found
    assert red[0] > max(red[1:3]) and green[1] > max(green[0], green[2])
    assert blue != other_blue and all(shade[2] > shade[0] for shade in (blue, other_blue))
    assert cycle == ["C1", "C4", "C4"]


def test_figures(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / f"{n}", ranks=n)) for n in (1, 2, 4)]
    runs.append(read_run(write_run(tmp_path / "ar", target=None)))
    by_time, by_step = drawn(error_figure, runs).axes
    assert by_time.get_xlabel() == "training time (seconds)" and by_step.get_xlabel() == "iterations"
    assert [ydata(line) for line in by_step.lines[:2]] == [[50.0, 40.0, 30.0]] * 2
    times, rates = scaling_figure(runs).axes
    assert times.get_ylabel() == "time per iteration (s)" and rates.get_ylabel() == "throughput (samples/s)"
    assert [xdata(line) for line in times.lines] == [[2], [1, 2, 4]]
    assert ydata(times.lines[1]) == [1.0, 1.5, 2.5]
    assert ydata(rates.lines[1]) == [32.0, 2 * 32 / 1.5, 4 * 32 / 2.5]
    assert len(drawn(loss_figure, runs).axes[0].lines) == 2 * len(runs)
    assert [time_unit(seconds)[1] for seconds in (100, 1000, 20000)] == ["seconds", "minutes", "hours"]
    (axes,) = drawn(bytes_figure, runs[1:3]).axes
    assert axes.get_xscale() == "log" and xdata(axes.lines[1]) == [24_000, 48_000, 72_000]
    assert ydata(axes.lines[0]) == [51.0, 61.0, 71.0]


def test_one_method_on_several_numbers_of_ranks_is_distinguishable(tmp_path: Path) -> None:
    """By marker or line style, and by name. Runs on the same number of ranks differ by colour."""
    ranks = {"a": 1, "b": 2, "c": 4, "d": 4}
    runs = [read_run(write_run(tmp_path / name, None, n, compression="DGC")) for name, n in ranks.items()]
    for make, every, line in ((error_figure, 2, 1), (bytes_figure, 1, 0), (loss_figure, 2, 1)):
        figure = drawn(make, runs)
        lines = figure.axes[0].lines[line::every]
        looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines]
        assert len(set(looks)) == 4 and looks[0][0] == looks[1][0] == looks[2][0] != looks[3][0], make
        texts = [text.get_text() for text in figure.legends[0].get_texts()]
        assert texts[:2] == ["DGC, 1 rank", "DGC, 2 ranks"] and len(set(texts)) == len(texts)
        markers = [line for line in figure.axes[0].lines if line.get_marker() != "None"]
        assert not any(line.get_clip_on() for line in markers)


def test_a_metric_that_is_no_accuracy(tmp_path: Path) -> None:
    """It is drawn as it is, under its name. Runs with different metrics are refused."""
    bits = "bits_per_character/test"
    directories = [write_run(tmp_path / name) for name in "ab"]
    for directory, metric in zip(directories, (bits, "acc/test_top5"), strict=True):
        tree = yaml.safe_load((directory / "config.yaml").read_text())
        tree["train"]["metric"] = metric
        (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    runs = [read_run(directory) for directory in directories]
    for run, metric, label, shown in (
        (runs[0], bits, bits, [51.0, 61.0, 71.0]),
        (runs[1], "acc/test_top5 (%)", "100 % - acc/test_top5 (%)", [49.0, 39.0, 29.0]),
    ):
        assert run.training.y == [] and run.validation.y == [51.0, 61.0, 71.0]
        for axes in drawn(error_figure, [run]).axes:
            assert axes.get_ylabel() == label and ydata(axes.lines[1]) == shown
        (axes,) = drawn(bytes_figure, [run]).axes
        assert axes.get_ylabel() == f"{metric}, validation" and ydata(axes.lines[0]) == [51.0, 61.0, 71.0]
    with pytest.raises(PlotError, match="cannot be compared: metric is"):
        check_comparable(runs)


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a=b")
    other = f"AR-SGD={write_run(tmp_path / 'ar', target=None)}"
    assert main([str(run), other, "--out", str(tmp_path / "out")]) == 0
    output = capsys.readouterr()
    names_ = ("error", "bytes", "scaling", "loss")
    expected = [tmp_path / "out" / f"{name}.{kind}" for name in names_ for kind in ("png", "svg")]
    assert output.out.splitlines() == [str(path) for path in expected] and not output.err
    for path in expected:
        if path.suffix == ".svg":
            ElementTree.parse(path)
        else:
            assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: object) -> str:
        assert main([*map(str, words), "--out", str(tmp_path / "out")]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    run = write_run(tmp_path / "run")
    csv = run / "csv" / "out_r0_n2.csv"
    text = csv.read_text()
    assert "no run directory" in refused(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "has neither CSV files of ranks nor" in refused(tmp_path / "empty")

    lines = text.splitlines(keepends=True)
    for damaged, message in (
        (text.replace("BEGIN-TRAINING", "BEGIN"), "out_r0_n2.csv is not a CSV log"),
        ("".join(lines[:5]), "no rows"),
        ("".join([*lines[:6], "damage\n", *lines[6:]]), "line 7, is damaged: 'damage'"),
        (text.replace("Batch-Size,32", "Batch-Size,16"), "several runs"),
    ):
        csv.write_text(damaged)
        with case(message):
            assert message in refused(run)
    csv.write_text(text)
    (run / "csv" / "out_r0_n4.csv").write_text(text)
    assert "files of 2 and of 4 ranks" in refused(run)
    (run / "csv" / "out_r0_n4.csv").unlink()

    other = write_run(tmp_path / "other", model="dgc_models.Other")
    message = refused(run, other)
    assert "cannot be compared: model is" in message and "dgc_models.Other in" in message
    (run / "config.yaml").write_text("train: {}")
    assert f"LABEL={run}" in refused(run)
    (run / "config.yaml").write_text("train: {")
    with pytest.raises(PlotError, match="config.yaml is damaged"):
        read_run(run)
