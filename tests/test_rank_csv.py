"""The CSV file of a rank: its format, its statistics, and resumed jobs."""

import csv
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.gossip.rank_csv import CsvLog, Increments, Running, accuracy

REFERENCE = (
    "Epoch,itr,BT(s),avg:BT(s),std:BT(s),NT(s),avg:NT(s),std:NT(s),DT(s),avg:DT(s),std:DT(s),"
    "Loss,avg:Loss,Prec@1,avg:Prec@1,Prec@5,avg:Prec@5,val"
)
STEPS = 8
OPENED: list[CsvLog] = []


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
        first, last = start[1] if epoch == start[0] else 0, end[1] if epoch == end[0] else STEPS
        for itr in range(first, last):
            loss = torch.tensor(10.0 - epoch - itr / 10)
            metrics = {"payload_bytes": 100.0, "wire_bytes": 150.0, "wait(s)": 0.5, "weight": 0.5}
            metrics["staleness"] = float(itr % 2)
            samples = 32 if itr < STEPS - 1 else 8
            out.step(epoch, itr, seconds(epoch, itr), 0.25, loss, 25.0, 50.0, samples, metrics)
        if epoch < end[0]:
            out.end_epoch(epoch, 60.0 + epoch, 0.125)
    return out


def test_rows_columns_and_statistics(tmp_path: Path) -> None:
    train(log(tmp_path), (0, 0), (2, 0)).close()
    table = rows(tmp_path)
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
    # times cover all epochs without their first two steps; losses cover one epoch, weighted by samples
    assert table[0]["avg:BT(s)"] == table[0]["std:BT(s)"] == "-1" and table[0]["BT(s)"] == "1"
    counted = [seconds(epoch, itr) for epoch in (0, 1) for itr in range(2, STEPS)]
    last = table[-1]
    assert float(last["avg:BT(s)"]) == pytest.approx(statistics.mean(counted), rel=1e-5)
    assert float(last["std:BT(s)"]) == pytest.approx(statistics.stdev(counted), rel=1e-5)
    assert float(last["avg:NT(s)"]) == pytest.approx(statistics.mean(counted) - 0.25, rel=1e-5)
    assert (last["avg:DT(s)"], last["std:DT(s)"]) == ("0.25", "0")
    every = [seconds(epoch, itr) for epoch in (0, 1) for itr in range(STEPS)]
    assert float(last["elapsed(s)"]) == pytest.approx(sum(every))
    weights = [32] * 7 + [8]
    mean = sum(w * (9.0 - itr / 10) for itr, w in enumerate(weights)) / sum(weights)
    assert float(table[-2]["avg:Loss"]) == pytest.approx(mean, rel=1e-5)
    assert table[5]["Loss"] == table[5]["avg:Loss"] == "9"


@pytest.mark.parametrize("at", [(0, 1), (0, 4), (0, STEPS), (1, 0), (1, 7), (1, STEPS)])
@pytest.mark.parametrize("killed", ["", "1,2,0.5,0", "1,-1,0.5\n", "no row\n"])
def test_a_resumed_job_writes_the_same_rows(tmp_path: Path, at: Any, killed: Any) -> None:
    """The state is saved before step `at`. The killed job continues to the end and leaves an incomplete line."""
    train(log(tmp_path / "whole"), (0, 0), (2, 0)).close()
    first = train(log(tmp_path / "parts"), (0, 0), at)
    state = json.loads(json.dumps(first.state_dict()))

    def to_the_end(out: CsvLog) -> None:
        if at[1] == STEPS:  # saved after the epoch's last step, before its validation
            out.end_epoch(at[0], 60.0 + at[0], 0.125)
        train(out, (at[0] + 1, 0) if at[1] == STEPS else at, (2, 0)).close()

    to_the_end(first)
    path = tmp_path / "parts" / "csv" / "out_r1_n4.csv"
    path.write_text(path.read_text() + killed)
    to_the_end(log(tmp_path / "parts", state))
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_another_number_of_ranks_continues_its_earlier_file(tmp_path: Path) -> None:
    train(log(tmp_path), (0, 0), (1, 4)).close()
    resumed = log(tmp_path)
    resumed.begin_at(1, 2, 100.0)
    train(resumed, (1, 2), (2, 0)).close()
    table = rows(tmp_path)
    assert [row["itr"] for row in table if row["Epoch"] == "1"] == ["0", "2", "5", "7", "-1"]
    assert float(table[6]["elapsed(s)"]) > 100


def test_a_missing_or_foreign_file_is_replaced(tmp_path: Path) -> None:
    state = train(log(tmp_path / "a"), (0, 0), (1, 0)).state_dict()
    train(log(tmp_path / "a"), (0, 0), (0, 1))
    assert len(rows(tmp_path / "a")) == 1  # begun anew without a state
    foreign = tmp_path / "b" / "csv" / "out_r1_n4.csv"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"\xff\x00 nothing\n" * 9)
    for name in ("b", "c"):
        train(log(tmp_path / name, state), (1, 0), (1, 4))
        assert [row["itr"] for row in rows(tmp_path / name)] == ["0", "3"]


def test_a_killed_job_keeps_every_row(tmp_path: Path) -> None:
    out = train(log(tmp_path), (0, 0), (0, 4))
    assert [row["itr"] for row in rows(tmp_path)] == ["0", "3"]
    out.close()
    train(out, (0, 4), (0, STEPS)).end_epoch(0)  # without validation
    assert [row["itr"] for row in rows(tmp_path)] == ["0", "3", "6", "7", "-1"]
    assert rows(tmp_path)[-1]["val"] == rows(tmp_path)[-1]["consensus"] == "-1"


def test_errors(tmp_path: Path) -> None:
    out = log(tmp_path)
    with pytest.raises(ValueError, match="no metrics .'bites'.*wait"):
        out.step(0, 0, 1.0, 0.0, 1.0, -1, -1, 32, {"bites": 1.0})
    state = train(out, (0, 0), (0, 1)).state_dict()
    with pytest.raises(ValueError, match="before the first row"):
        out.load_state_dict(state)
    with pytest.raises(ValueError, match="csv.elapsed is of type str"):
        log(tmp_path, {**state, "elapsed": "long"})
    with pytest.raises(ValueError, match="every is 0"):
        log(tmp_path, every=0)
    # unknown scores and NaN are none
    out = log(tmp_path / "nan")
    out.step(0, 0, 1.0, 0.0, torch.tensor(float("nan")), -1, -1, 32)
    (row,) = rows(tmp_path / "nan")
    assert (row["Loss"], row["Prec@1"], row["avg:Prec@5"], row["weight"]) == ("nan", "-1", "-1", "1")


def test_what_a_row_has_is_computed() -> None:
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
    assert [float(value) for value in accuracy(outputs, targets, (1, 2, 5))] == [50.0, 75.0, 100.0]
    assert [float(value) for value in accuracy(outputs, targets)] == [50.0, 100.0]
    with pytest.raises(ValueError, match=r"not \[n, c\] and \[n\]"):
        accuracy(outputs, targets[:2])
