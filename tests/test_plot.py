"""The CSV file of a rank: its format, its statistics, resumed jobs; the plots of such files, and their errors."""

import csv
import json
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from refusals import refuse
from simulated import CNN, summary_of, train_in

from scripts import plot_figures
from scripts.gossip.csv_runs import read_run
from scripts.gossip.rank_csv import CsvLog, Increments, Running
from scripts.gossip.rank_csv import accuracy as scores
from scripts.plot import main
from scripts.plot_figures import colours, log_axis, names, time_unit
from scripts.plot_runs import check_comparable, is_lower_better, metric_of, unit_of
from scripts.report_runs import read_reported
from scripts.run_files import PlotError

REFERENCE = "Epoch,itr,BT(s),avg:BT(s),std:BT(s),NT(s),avg:NT(s),std:NT(s),DT(s),avg:DT(s),std:DT(s),"
REFERENCE += "Loss,avg:Loss,Prec@1,avg:Prec@1,Prec@5,avg:Prec@5,val"
PER_EPOCH = 8
OPENED: list[CsvLog] = []
draw: Any = plot_figures  # a figure may be None


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def log(directory: Path, state: dict | None = None, **options: int) -> CsvLog:
    form = {"rank": 1, "size": 4, "batch_size": 32, "num_workers": 2, "every": 3, "ignore": 2} | options
    OPENED.append(CsvLog(directory, **form, state=state))
    return OPENED[-1]


def rows(directory: Path) -> list[dict[str, str]]:
    lines = (directory / "csv" / "out_r1_n4.csv").read_text().splitlines()
    assert lines[:4] == ["BEGIN-TRAINING", "World-Size,4", "Num-DLWorkers,2", "Batch-Size,32"]
    assert lines[4] == REFERENCE + ",consensus,weight,payload_bytes,wire_bytes,staleness,wait(s),elapsed(s)"
    return list(csv.DictReader(lines[4:]))


def seconds(epoch: int, itr: int) -> float:
    return 1.0 + 0.25 * ((5 * epoch + 3 * itr) % 7)


def train(out: CsvLog, start: tuple[int, int], end: tuple[int, int]) -> CsvLog:
    """Steps from `start` to before `end`, both (epoch, itr)."""
    for epoch in range(start[0], end[0] + 1):
        first, last = start[1] if epoch == start[0] else 0, end[1] if epoch == end[0] else PER_EPOCH
        for itr in range(first, last):
            loss = torch.tensor(10.0 - epoch - itr / 10)
            sent = {"payload_bytes": 100.0, "wire_bytes": 150.0}
            metrics = {**sent, "wait(s)": 0.5, "weight": 0.5, "staleness": float(itr % 2)}
            samples = 32 if itr < PER_EPOCH - 1 else 8
            out.step(epoch, itr, seconds(epoch, itr), 0.25, loss, 25.0, 50.0, samples, metrics)
        if epoch < end[0]:
            out.end_epoch(epoch, 60.0 + epoch, 0.125)
    return out


@pytest.fixture
def table_of_two_epochs(tmp_path: Path) -> list[dict[str, str]]:
    train(log(tmp_path), (0, 0), (2, 0)).close()
    return rows(tmp_path)


def test_a_row_has_the_columns_of_its_steps(table_of_two_epochs: list[dict[str, str]]) -> None:
    table = table_of_two_epochs
    columns = {name: " ".join(row[name] for row in table) for name in table[0]}
    assert columns["Epoch"] == "0 0 0 0 0 1 1 1 1 1" and columns["itr"] == "0 3 6 7 -1 0 3 6 7 -1"
    assert columns["val"] == "-1 -1 -1 -1 60 -1 -1 -1 -1 61"
    assert columns["payload_bytes"] == "100 300 300 100 0 100 300 300 100 0"
    assert columns["wire_bytes"] == "150 450 450 150 0 150 450 450 150 0"
    assert columns["wait(s)"] == "0.5 1.5 1.5 0.5 0 0.5 1.5 1.5 0.5 0"
    assert columns["consensus"] == "-1 -1 -1 0.125 0.125 -1 -1 -1 0.125 0.125"
    assert {row["weight"] for row in table} == {"0.5"} and table[1]["staleness"] == "1"
    for name in ("Loss", "avg:Loss", "Prec@1", "avg:Prec@1", "Prec@5", "avg:Prec@5"):
        assert table[4][name] == "-1" and float(table[3][name]) > 0


def test_times_cover_all_epochs_without_their_first_two_steps(table_of_two_epochs: list[dict[str, str]]) -> None:
    table = table_of_two_epochs
    assert table[0]["avg:BT(s)"] == table[0]["std:BT(s)"] == "-1" and table[0]["BT(s)"] == "1"
    last, counted = table[-1], [seconds(epoch, itr) for epoch in (0, 1) for itr in range(2, PER_EPOCH)]
    mean, deviation = statistics.mean(counted), statistics.stdev(counted)
    found = [float(last[name]) for name in ("avg:BT(s)", "std:BT(s)", "avg:NT(s)")]
    assert found == pytest.approx([mean, deviation, mean - 0.25], rel=1e-5)
    assert (last["avg:DT(s)"], last["std:DT(s)"]) == ("0.25", "0")
    every = [seconds(epoch, itr) for epoch in (0, 1) for itr in range(PER_EPOCH)]
    assert float(last["elapsed(s)"]) == pytest.approx(sum(every))


def test_losses_cover_one_epoch_weighted_by_samples(table_of_two_epochs: list[dict[str, str]]) -> None:
    table = table_of_two_epochs
    mean = sum(w * (9.0 - itr / 10) for itr, w in enumerate([32] * 7 + [8])) / 232
    assert float(table[-2]["avg:Loss"]) == pytest.approx(mean, rel=1e-5)
    assert table[5]["Loss"] == table[5]["avg:Loss"] == "9"


@pytest.mark.parametrize("at", [(0, 1), (0, 4), (0, PER_EPOCH), (1, 0), (1, 7), (1, PER_EPOCH)])
@pytest.mark.parametrize("killed", ["", "1,2,0.5,0", "1,-1,0.5\n", "no row\n"])
def test_a_resumed_job_writes_the_same_rows(tmp_path: Path, at: Any, killed: Any) -> None:
    """The state is saved before step `at`. The killed job continues to the end and leaves an incomplete line."""
    train(log(tmp_path / "whole"), (0, 0), (2, 0)).close()
    first = train(log(tmp_path / "parts"), (0, 0), at)
    state = json.loads(json.dumps(first.state_dict()))

    def to_the_end(out: CsvLog) -> None:
        if at[1] == PER_EPOCH:  # saved after the epoch's last step, before its validation
            out.end_epoch(at[0], 60.0 + at[0], 0.125)
        train(out, (at[0] + 1, 0) if at[1] == PER_EPOCH else at, (2, 0)).close()

    to_the_end(first)
    path = tmp_path / "parts" / "csv" / "out_r1_n4.csv"
    path.write_text(path.read_text() + killed)
    to_the_end(log(tmp_path / "parts", state))
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_what_an_earlier_file_becomes(tmp_path: Path) -> None:
    """Another number of ranks continues it. A missing or foreign one is replaced. A killed job keeps every row."""
    other = tmp_path / "other"
    train(log(other), (0, 0), (1, 4)).close()
    resumed = log(other)
    resumed.begin_at(1, 2, 100.0)
    train(resumed, (1, 2), (2, 0)).close()
    table = rows(other)
    assert [row["itr"] for row in table if row["Epoch"] == "1"] == ["0", "2", "5", "7", "-1"]
    assert float(table[6]["elapsed(s)"]) > 100
    state = train(log(tmp_path / "a"), (0, 0), (1, 0)).state_dict()
    train(log(tmp_path / "a"), (0, 0), (0, 1))
    assert len(rows(tmp_path / "a")) == 1  # begun anew without a state
    foreign = tmp_path / "b" / "csv" / "out_r1_n4.csv"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"\xff\x00 nothing\n" * 9)
    for name in ("b", "c"):
        train(log(tmp_path / name, state), (1, 0), (1, 4))
        assert [row["itr"] for row in rows(tmp_path / name)] == ["0", "3"]
    killed = tmp_path / "killed"
    out = train(log(killed), (0, 0), (0, 4))
    assert [row["itr"] for row in rows(killed)] == ["0", "3"]
    out.close()
    train(out, (0, 4), (0, PER_EPOCH)).end_epoch(0)  # without validation
    assert [row["itr"] for row in rows(killed)] == ["0", "3", "6", "7", "-1"]
    assert rows(killed)[-1]["val"] == rows(killed)[-1]["consensus"] == "-1"


def test_errors_of_the_log(tmp_path: Path) -> None:
    out = log(tmp_path)
    refuse("no metrics .'bites'.*wait", out.step, 0, 0, 1.0, 0.0, 1.0, -1, -1, 32, {"bites": 1.0})
    state = train(out, (0, 0), (0, 1)).state_dict()
    refuse("before the first row", out.load_state_dict, state)
    refuse("csv.elapsed is of type str", log, tmp_path, {**state, "elapsed": "long"})
    refuse("every is 0", log, tmp_path, every=0)
    # unknown scores and NaN are none
    log(tmp_path / "nan").step(0, 0, 1.0, 0.0, torch.tensor(float("nan")), -1, -1, 32)
    (row,) = rows(tmp_path / "nan")
    assert (row["Loss"], row["Prec@1"], row["avg:Prec@5"], row["weight"]) == ("nan", "-1", "-1", "1")
    running = Running()  # stable far from zero
    assert running.deviation == -1
    for value in (4.0, 7.0, 13.0, 16.0):
        running.add(1e9 + value)
    assert running.mean == 1e9 + 10 and running.deviation == pytest.approx(30**0.5)
    since = Increments({"bytes": 10.0})
    assert since({"bytes": 15.0, "wait(s)": 2.0}) == {"bytes": 5.0, "wait(s)": 2.0}
    assert since({"bytes": 15.0, "wait(s)": 2.5}) == {"bytes": 0.0, "wait(s)": 0.5}
    outputs = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.3], [0.2, 0.3, 0.4], [0.0, 0.5, 0.2]])
    targets = torch.tensor([1, 2, 0, 1])
    assert list(map(float, scores(outputs, targets, (1, 2, 5)))) == [50.0, 75.0, 100.0]
    assert list(map(float, scores(outputs, targets))) == [50.0, 100.0]
    refuse(r"not \[n, c\] and \[n\]", scores, outputs, targets[:2])


def named(kind: str, **more: Any) -> dict[str, Any]:
    return {"_target_": f"dgc.{kind}", **more}


def write_run(directory: Path, kind: Any = "gossip.SGP", ranks: int = 2, batch: int = 32, **other: Any) -> Path:
    """Rank r takes 1 + r seconds per step, 10 for the first. Accuracy: 50, 60, ... %; in validation 2 r more."""
    compression = named(f"compression.{other.pop('compression', 'Dense')}Compressor")
    train = {"gossip": named(kind) if kind else None, "compression": compression}
    directory.mkdir(parents=True)
    config = {"dataset": {"_target_": "dgc_datasets.Digits"}, "model": {"_target_": "dgc_models.DigitsCNN"}}
    (directory / "config.yaml").write_text(yaml.safe_dump({**config, **other, "train": train}))
    for rank in range(ranks):
        log = CsvLog(directory, rank=rank, size=ranks, batch_size=batch, every=4, ignore=2)
        for epoch, accuracy in enumerate((50.0, 60.0, 70.0)):
            for itr in range(6):
                seconds = 10.0 if (epoch, itr) == (0, 0) else 1.0 + rank
                sent = {"wire_bytes": 1000.0 * ranks}
                log.step(epoch, itr, seconds, 0.0, 3.0 - epoch + rank, accuracy, 90.0, batch, sent)
            log.end_epoch(epoch, accuracy + 2 * rank)
        log.close()
    return directory


def data(line: Any, axis: str = "y") -> list[float]:
    return np.asarray(line.get_data()["xy".index(axis)]).tolist()


def test_the_values_of_a_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert (run.label, run.ranks, run.batch, run.seconds_per_step) == ("SGP", 2, 32, 1.5)
    assert run.samples_per_second == pytest.approx(2 * 32 / 1.5)
    assert run.training.y == [50.0, 60.0, 70.0] and run.validation.y == [51.0, 61.0, 71.0]
    assert run.training.steps == [6, 12, 18]
    assert run.training.seconds == [(15 + 20) / 2, (21 + 32) / 2, (27 + 44) / 2]
    assert run.validation.wire == [12_000, 24_000, 36_000] and run.loss.steps == [1, 5, 6, 7, 11, 12, 13, 17, 18]
    assert run.loss.y == [3.5] * 3 + [2.5] * 3 + [1.5] * 3
    # killed: the last line of a rank is incomplete; only epochs that all ranks have completed are plotted
    path = tmp_path / "run" / "csv" / "out_r1_n2.csv"
    text = path.read_text()
    for cut in (1, 20, 97):
        path.write_text(text[:-cut])
        run = read_run(tmp_path / "run")
        assert run.training.y == [50.0, 60.0] and len(run.loss.y) == 9, cut
    # the elapsed time of a file with 18 columns, as in the reference, is estimated from the steps since a row
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
    log(tmp_path / "new", rank=0, size=1).step(0, 0, 1.0, 0.0, 2.0, 10.0, 50.0, 32)
    assert main([f"new={tmp_path / 'new'}", *options]) == 0
    output = capsys.readouterr()
    assert "no figure 'error'" in output.err and "no figure 'bytes'" in output.err and output.out.count("svg") == 2
    # all figures of two runs
    words = [str(write_run(tmp_path / "a=b")), f"AR-SGD={write_run(tmp_path / 'ar', None)}"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    output = capsys.readouterr()
    figures = product(("error", "bytes", "scaling", "loss"), ("png", "svg"))
    expected = [tmp_path / "out" / f"{name}.{kind}" for name, kind in figures]
    assert output.out.splitlines() == [str(path) for path in expected] and not output.err
    for path in expected:
        if path.suffix == ".svg":
            ElementTree.parse(path)
        else:
            assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


NESTEROV, POWER = named("local.Nesterov"), named("compression.PowerSGDCompressor")
LABELS: dict[str, dict[str, Any]] = {
    "AR-SGD": {"gossip": None, "compression": named("compression.DenseCompressor")},
    "DGC": {"compression": named("compression.DGCCompressor")},
    "D-PSGD": {"gossip": named("gossip.DPSGD")},
    "AD-PSGD": {"gossip": named("gossip.ADPSGD")},
    "OSGP + PGA": {"gossip": named("gossip.Periodic", base=named("gossip.OSGP"))},
    "local SGD": {"gossip": named("gossip.Periodic", base=None)},
    "local SGD + SlowMo": {"gossip": {"_target_": "Periodic", "base": None, "outer": {"_target_": "a.SlowMo"}}},
    "local SGD + Nesterov + PowerSGD": {"gossip": named("local.OuterSteps", outer=NESTEROV, compression=POWER)},
}


def test_a_name_has_what_tells_runs_apart(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, ranks=n)) for name, n in (("a", 1), ("b", 2), ("c", 2))]
    assert names(runs[:1]) == ["SGP"] and names(runs[:2]) == ["SGP, 1 rank", "SGP, 2 ranks"]
    assert names(runs)[1:] == ["SGP, 2 ranks (b)", "SGP, 2 ranks (c)"]


@pytest.mark.parametrize("label", LABELS)
def test_a_label_says_the_method(label: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", ranks=1)
    (path / "config.yaml").write_text(yaml.safe_dump({"train": LABELS[label]}))
    assert read_run(path).label == label and read_run(path, "mine").label == "mine"


def test_the_colours_of_methods() -> None:
    found = colours([(name, 0) for name in ("AR-SGD", "D-PSGD", "SGP", "OSGP", "AD-PSGD", "DGC", "DGC")])
    red, green, blue, other_blue, *cycle = found
    assert red[0] > max(red[1:3]) and green[1] > max(green[0], green[2])
    assert blue != other_blue and all(shade[2] > shade[0] for shade in (blue, other_blue))
    assert cycle == ["C1", "C4", "C4"]


@pytest.mark.parametrize("ratio", [1.0, 1.02, 1.5, 2, 5, 10, 30, 100, 1e4, 1e8])
@pytest.mark.parametrize(("width", "labels"), [(4.5, 6), (7, 9)])
def test_labels_of_a_logarithmic_axis_do_not_overlap(width: float, labels: int, ratio: float) -> None:
    for first in (1.0, 3.3e3, 6.2e10):
        figure = Figure(figsize=(width, 3.1), layout="constrained")
        axes = figure.subplots()
        axes.plot([first, first * ratio], [1, 2])
        axes.set_xscale("log")
        log_axis(axes.xaxis, EngFormatter("B"), labels)
        FigureCanvasAgg(figure).draw()
        boxes = [tick.label1.get_window_extent() for tick in axes.xaxis.get_major_ticks()]
        assert 2 <= len(boxes) <= labels
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_figures(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / f"{n}", ranks=n)) for n in (1, 2, 4)]
    runs.append(read_run(write_run(tmp_path / "ar", None)))
    by_time, by_step = draw.error_figure(runs).axes
    assert by_time.get_xlabel() == "training time (seconds)" and by_step.get_xlabel() == "iterations"
    assert [data(line) for line in by_step.lines[:2]] == [[50.0, 40.0, 30.0]] * 2
    times, rates = draw.scaling_figure(runs).axes
    assert times.get_ylabel() == "time per iteration (s)" and rates.get_ylabel() == "throughput (samples/s)"
    assert [data(line, "x") for line in times.lines] == [[2], [1, 2, 4]]
    assert data(times.lines[1]) == [1.0, 1.5, 2.5]
    assert data(rates.lines[1]) == [32.0, 2 * 32 / 1.5, 4 * 32 / 2.5]
    assert len(draw.loss_figure(runs).axes[0].lines) == 2 * len(runs)
    assert [time_unit(seconds)[1] for seconds in (100, 1000, 20000)] == ["seconds", "minutes", "hours"]
    (axes,) = draw.bytes_figure(runs[1:3]).axes
    assert axes.get_xscale() == "log" and data(axes.lines[1], "x") == [24_000, 48_000, 72_000]
    assert data(axes.lines[0]) == [51.0, 61.0, 71.0]
    # runs of one method on several numbers of ranks differ by marker or line style, and name; others by colour
    ranks = {"a": 1, "b": 2, "c": 4, "d": 4}
    runs = [read_run(write_run(tmp_path / name, None, n, compression="DGC")) for name, n in ranks.items()]
    for make, every, line in ((draw.error_figure, 2, 1), (draw.bytes_figure, 1, 0), (draw.loss_figure, 2, 1)):
        figure = make(runs)
        lines = figure.axes[0].lines[line::every]
        looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines]
        assert len(set(looks)) == 4 and looks[0][0] == looks[1][0] == looks[2][0] != looks[3][0], make
        texts = [text.get_text() for text in figure.legends[0].get_texts()]
        assert texts[:2] == ["DGC, 1 rank", "DGC, 2 ranks"] and len(set(texts)) == len(texts)
        markers = [line for line in figure.axes[0].lines if line.get_marker() != "None"]
        assert not any(line.get_clip_on() for line in markers)


def test_a_metric_that_is_no_accuracy(tmp_path: Path) -> None:
    """It is drawn as it is, under its name. Runs with different metrics are refused."""
    bits, runs = "bits_per_character/test", []
    for metric, shown_as, label, shown in (
        (bits, bits, bits, [51.0, 61.0, 71.0]),
        ("acc/test_top5", "acc/test_top5 (%)", "100 % - acc/test_top5 (%)", [49.0, 39.0, 29.0]),
    ):
        directory = write_run(tmp_path / metric)
        tree = yaml.safe_load((directory / "config.yaml").read_text())
        (directory / "config.yaml").write_text(yaml.safe_dump({"train": {**tree["train"], "metric": metric}}))
        runs.append(run := read_run(directory))
        assert run.training.y == [] and run.validation.y == [51.0, 61.0, 71.0]
        for axes in draw.error_figure([run]).axes:
            assert axes.get_ylabel() == label and data(axes.lines[1]) == shown
        (axes,) = draw.bytes_figure([run]).axes
        assert axes.get_ylabel() == f"{shown_as}, validation" and data(axes.lines[0]) == [51.0, 61.0, 71.0]
    with pytest.raises(PlotError, match="cannot be compared: metric is"):
        check_comparable(runs)


def test_a_run_says_the_direction_of_its_metric(tmp_path: Path) -> None:
    settings = "from dgc_training.config import Config, configs\nfrom dgc_training.meters import TokenLoss\n"
    settings += "configs.train.meters = {'mine/{}': Config(TokenLoss)}\nconfigs.train.metric = 'mine/test'\n"
    (tmp_path / "loss.py").write_text(settings)
    directory = tmp_path / "run"
    train_in(directory, [CNN, tmp_path / "loss.py"], ["train.num_epochs=1", "model.width=8"], size=1)
    assert summary_of(directory)["lower_is_better"] is True
    (directory / "summary.json").unlink()
    (run,) = read_reported([str(directory)])
    assert run.lower_is_better and not run.unit


OWN_METER = {"_target_": "dgc_training.meters.TopKClassMeter"}
METRICS: list[tuple[str, Any, dict[str, Any], bool, str]] = [
    ("acc/test_top1", {"acc/{}_top1": OWN_METER}, {}, False, "%"),
    ("mine/test", {"other/{}": OWN_METER}, {}, False, ""),
    ("mine/test", {"mine/{}": OWN_METER}, {}, False, "%"),
    ("mine/test", {"mine/{}": OWN_METER}, {"lower_is_better": True}, True, "%"),
    ("mine/test", {"mine/{}": {"_target_": "dgc_training.meters.Perplexity"}}, {}, True, ""),
    ("loss/test", {"loss/{}": {"_target_": "absent.Meter"}}, {}, True, ""),
    ("translation/test_nll", None, {}, True, ""),
    ("translation/test_bleu", None, {}, False, ""),
    ("translation/test_exact_match", None, {}, False, "%"),
]


@pytest.mark.parametrize(("name", "meters", "summary", "lower", "unit"), METRICS)
def test_a_metric_has_a_direction(name: str, meters: Any, summary: Any, lower: bool, unit: str) -> None:
    config = {"train": {"metric": name, "meters": meters}}
    assert (is_lower_better(config, summary), unit_of(config, summary)) == (lower, unit)


def test_the_metric_of_a_run_that_names_none() -> None:
    assert (is_lower_better({}, {}), unit_of({}, {}), metric_of({}, {})) == (False, "%", "top-1 accuracy")


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: object) -> str:
        assert main([*map(str, words), "--out", str(tmp_path / "out")]) == 2 and not (tmp_path / "out").exists()
        return capsys.readouterr().err

    run = write_run(tmp_path / "run")
    file = run / "csv" / "out_r0_n2.csv"
    text = file.read_text()
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
        file.write_text(damaged)
        assert message in refused(run)
    file.write_text(text)
    file.with_name("out_r0_n4.csv").write_text(text)
    assert "files of 2 and of 4 ranks" in refused(run)
    file.with_name("out_r0_n4.csv").unlink()
    message = refused(run, write_run(tmp_path / "other", model="dgc_models.Other"))
    assert "cannot be compared: model is" in message and "dgc_models.Other in" in message
    (run / "config.yaml").write_text("train: {}")
    assert f"LABEL={run}" in refused(run)
    (run / "config.yaml").write_text("train: {")
    with pytest.raises(PlotError, match="config.yaml is damaged"):
        read_run(run)
