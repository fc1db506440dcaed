"""`scripts.report` on damaged runs: each is one line that names the file and the reason, or a page without markup
of its own. No case is a traceback."""

import json
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from scripts.report import main

EVIL = "<script>alert('x')</script>"
METRIC = "acc/test_top1"
SUMMARY = {"epochs": 2, "metric": METRIC, "final": {METRIC: 55.0}, "best": {METRIC: 60.0}, "best_epoch": 1}
DENSE = {"_target_": "dgc.compression.DenseCompressor"}
CONFIG = {"train": {"metric": METRIC, "num_epochs": 2, "compression": DENSE}}
HEAD = "Epoch,itr,BT(s),DT(s),avg:BT(s),Loss,avg:Prec@1,val,wire_bytes,wait(s),elapsed(s)"
ROWS = ["0,0,2,1,2,3,50,-1,100,0.5,2", "0,1,2,1,2,2,60,-1,300,0.5,4", "0,-1,2,1,2,2,60,55,0,0,4"]
LOG = "csv/out_r0_n1.csv"
HUGE = "9" * 400
Damage = bytes | Callable[[Path], Any]


def summary(**changes: Any) -> bytes:
    return json.dumps({**SUMMARY, **changes}).encode()


def config(**changes: Any) -> bytes:
    return yaml.safe_dump({**CONFIG, "train": {**CONFIG["train"], **changes}}).encode()


def log(*rows: str, head: str = HEAD, start: str = "BEGIN-TRAINING", batch: str = "Batch-Size,8") -> bytes:
    return "\n".join([start, "World-Size,1", "Num-DLWorkers,0", batch, head, *(rows or ROWS), ""]).encode()


def row(**changes: str) -> bytes:
    """A log in which columns of the second row have other values."""
    cells = dict(zip(HEAD.split(","), ROWS[1].split(","), strict=True))
    by_name = {re.sub(r"\W", "", name): name for name in cells}
    cells.update({by_name[name]: value for name, value in changes.items()})
    return log(ROWS[0], ",".join(cells.values()), ROWS[2])


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def renamed(name: str) -> Callable[[Path], Any]:
    return lambda path: path.rename(path.with_name(name))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)
# file, damage: the report is refused with one line that names the file
REFUSED: dict[str, tuple[str, Damage]] = {
    "summary: empty": ("summary.json", b""),
    "summary: truncated": ("summary.json", summary()[:40]),
    "summary: cut within a character": ("summary.json", '{"metric": "é'.encode()[:-1]),
    "summary: binary": ("summary.json", bytes(range(256))),
    "summary: zeros": ("summary.json", bytes(100)),
    "summary: UTF-16": ("summary.json", summary().decode().encode("utf-16")),
    "summary: list": ("summary.json", b"[]"),
    "summary: number": ("summary.json", b"3"),
    "summary: null": ("summary.json", b"null"),
    "summary: text": ("summary.json", b'"epochs"'),
    "summary: no keys": ("summary.json", b"{}"),
    "summary: wrong keys": ("summary.json", b'{"loss": 3}'),
    "summary: two values": ("summary.json", summary() * 2),
    "summary: nested too deeply": ("summary.json", b'{"epochs": 1, "a": ' + b"[" * 100_000),
    "summary: directory": ("summary.json", directory),
    "summary: link to itself": ("summary.json", loop),
    "summary: digits without end": ("summary.json", b'{"epochs": ' + b"9" * 10_000 + b"}"),
    "summary: epochs of 400 digits": ("summary.json", f'{{"epochs": {HUGE}}}'.encode()),
    "summary: epochs as text": ("summary.json", summary(epochs=EVIL)),
    "summary: epochs NaN": ("summary.json", summary(epochs=float("nan"))),
    "summary: epochs infinite": ("summary.json", summary(epochs=float("inf"))),
    "summary: epochs negative": ("summary.json", summary(epochs=-1)),
    "summary: epochs true": ("summary.json", summary(epochs=True)),
    "summary: epochs as list": ("summary.json", summary(epochs=[2])),
    "summary: best_epoch as text": ("summary.json", summary(best_epoch=EVIL)),
    "summary: dropped_steps as text": ("summary.json", summary(dropped_steps=EVIL)),
    "summary: dropped_steps as mapping": ("summary.json", summary(dropped_steps={EVIL: 1})),
    "summary: final as number": ("summary.json", summary(final=55.0)),
    "summary: final as list": ("summary.json", summary(final=[55.0])),
    "summary: final of text": ("summary.json", summary(final={METRIC: EVIL})),
    "summary: best of lists": ("summary.json", summary(best={METRIC: [60.0]})),
    "summary: best as text": ("summary.json", summary(best=METRIC)),
    "summary: metric as list": ("summary.json", summary(metric=[METRIC])),
    "summary: wire_bytes as text": ("summary.json", summary(wire_bytes="400")),
    "summary: wire_bytes NaN": ("summary.json", summary(wire_bytes=float("nan"))),
    "summary: dense_wire_bytes as text": ("summary.json", summary(dense_wire_bytes=EVIL)),
    "summary: dense_wire_bytes huge": ("summary.json", summary(dense_wire_bytes=1e300)),
    "summary: direction as text": ("summary.json", summary(lower_is_better="no")),
    "config: empty": ("config.yaml", b""),
    "config: truncated": ("config.yaml", b"train: {metric: "),
    "config: binary": ("config.yaml", bytes(range(256))),
    "config: control characters": ("config.yaml", b"train: \x01"),
    "config: list": ("config.yaml", b"- 1\n- 2\n"),
    "config: text": ("config.yaml", b"train"),
    "config: directory": ("config.yaml", directory),
    "config: tab": ("config.yaml", b"train:\n\tmetric: 3\n"),
    "config: tag of Python": ("config.yaml", b"train: !!python/object/apply:os.system ['true']"),
    "config: key that cannot be hashed": ("config.yaml", b"? [1, 2]\n: 3\n? {a: b}\n: 4\n"),
    "config: date that does not exist": ("config.yaml", b"train: 2001-99-99"),
    "config: alias without anchor": ("config.yaml", b"train: *there"),
    "config: alias of itself": ("config.yaml", b"train: &a {b: *a}"),
    "config: aliases that multiply": ("config.yaml", BOMB.encode()),
    "config: nested too deeply": ("config.yaml", b"[" * 20_000),
    "config: digits without end": ("config.yaml", b"train: {num_epochs: " + b"9" * 10_000 + b"}"),
    "config: huge hexadecimal": ("config.yaml", b"seed: 0x" + b"f" * 10_000),
    "config: train as number": ("config.yaml", b"train: 5"),
    "config: train as list": ("config.yaml", b"train: [1]"),
    "config: num_epochs as text": ("config.yaml", config(num_epochs=EVIL)),
    "config: num_epochs as list": ("config.yaml", config(num_epochs=[2])),
    "config: num_epochs NaN": ("config.yaml", config(num_epochs=float("nan"))),
    "config: num_epochs huge": ("config.yaml", config(num_epochs=10**300)),
    "config: metric as number": ("config.yaml", config(metric=5)),
    "config: meters as list": ("config.yaml", config(meters=[METRIC])),
    "config: meter as text": ("config.yaml", config(meters={METRIC: "_target_"})),
    "config: compression as text": ("config.yaml", config(compression="_target_")),
    "config: gossip as list": ("config.yaml", config(gossip=["_target_"])),
    "config: target as number": ("config.yaml", config(compression={"_target_": 5})),
    "config: target as mapping": ("config.yaml", config(compression={"_target_": {"a": 1}})),
    "config: no algorithm": ("config.yaml", b"train: {num_epochs: 2}"),
    "log: empty": (LOG, b""),
    "log: one line": (LOG, b"BEGIN-TRAINING\n"),
    "log: binary": (LOG, bytes(range(256)) * 4),
    "log: directory": (LOG, directory),
    "log: link to itself": (LOG, loop),
    "log: other columns": (LOG, log(head=HEAD.replace("Loss", "Cost"))),
    "log: other preamble": (LOG, log(start="BEGIN")),
    "log: no batch size": (LOG, log(batch="Batch,8")),
    "log: batch size as text": (LOG, log(batch="Batch-Size,x")),
    "log: batch size of 0": (LOG, log(batch="Batch-Size,0")),
    "log: no rows": (LOG, log("")),
    "log: only a validation": (LOG, log(ROWS[2])),
    "log: text in a row": (LOG, row(Loss=EVIL)),
    "log: short row": (LOG, log(ROWS[0], "0,1", ROWS[2])),
    "log: epoch NaN": (LOG, row(Epoch="nan")),
    "log: epoch infinite": (LOG, row(Epoch="inf")),
    "log: epoch huge": (LOG, row(Epoch=HUGE)),
    "log: epoch negative": (LOG, row(Epoch="-3")),
    "log: itr infinite": (LOG, row(itr="inf")),
    "log: itr huge": (LOG, row(itr="1e300")),
    "log: seconds NaN": (LOG, row(BTs="nan")),
    "log: seconds infinite": (LOG, row(BTs="inf")),
    "log: waits infinite": (LOG, row(waits="inf")),
    "log: elapsed huge": (LOG, row(elapseds="1e305")),
    "log: bytes negative": (LOG, row(wire_bytes="-5e20")),
    "log: rank beyond the number of ranks": (LOG, renamed("out_r5_n2.csv")),
    "log: of no ranks": (LOG, renamed("out_r0_n0.csv")),
}
# file, damage: the report is written
SHOWN: dict[str, tuple[str, Damage]] = {
    "summary: absent": ("summary.json", Path.unlink),
    "summary: all null": ("summary.json", json.dumps(dict.fromkeys(SUMMARY) | {"epochs": 2}).encode()),
    "summary: final NaN": ("summary.json", summary(final={METRIC: float("nan")}, best={METRIC: float("nan")})),
    "summary: final huge": ("summary.json", summary(final={METRIC: 1e308}, best={METRIC: float("-inf")})),
    "summary: without best_epoch": ("summary.json", summary(best_epoch=None)),
    "summary: dropped steps": ("summary.json", summary(dropped_steps=10**29)),
    "summary: metric with markup": ("summary.json", summary(metric=EVIL, final={EVIL: 1.0}, best={EVIL: 1.0})),
    "summary: half of a surrogate pair": ("summary.json", b'{"epochs": 2, "metric": "\\ud800"}'),
    "summary: other keys with markup": ("summary.json", summary(**{EVIL: EVIL})),
    "config: absent but labelled": ("config.yaml", Path.unlink),
    "config: num_epochs is a formula": ("config.yaml", config(num_epochs="${derive:" + EVIL + "}")),
    "config: metric with markup": ("config.yaml", config(metric=EVIL)),
    "config: algorithm with markup": ("config.yaml", config(compression={"_target_": EVIL})),
    "config: parts that are no algorithms": (
        "config.yaml",
        config(local={"_target_": "dgc.local.OuterSteps", "base": 5, "outer": [EVIL], "compression": EVIL}),
    ),
    "config: keys that are no text": ("config.yaml", config() + b"5: {null: 1, 2.5: <b>}\n2001-01-01: 3\n"),
    "config: a binary and a set": ("config.yaml", config() + b"a: !!binary aGk=\nb: !!set {x, y}\n"),
    "config: characters that cannot be shown": ("config.yaml", config(kernels="a\x1b[31m\u202e\x00")),
    "log: last line cut": (LOG, log()[:-9]),
    "log: loss NaN": (LOG, row(Loss="nan")),
    "log: loss infinite": (LOG, row(Loss="inf")),
    "log: loss huge": (LOG, row(Loss="-1e308")),
    "log: every loss NaN": (LOG, log(*(re.sub(",[23],([56]0)", r",nan,\1", line) for line in ROWS))),
    "log: seconds 0": (LOG, log(*(re.sub(r"^(0,-?\d),2,1,2", r"\1,0,0,0", line) for line in ROWS))),
    "log: bytes unknown": (LOG, log(*(line.replace(",100,", ",-1,").replace(",300,", ",-1,") for line in ROWS))),
    "log: lines twice": (LOG, log(*ROWS, *ROWS)),
    "log: lines of Windows": (LOG, log().replace(b"\n", b"\r\n")),
}


def made(path: Path) -> Path:
    """A finished run."""
    (path / "csv").mkdir(parents=True)
    for name, content in (("summary.json", summary()), ("config.yaml", config()), (LOG, log())):
        (path / name).write_bytes(content)
    return path


def damaged(run: Path, name: str, damage: Damage) -> None:
    if isinstance(damage, bytes):
        (run / name).write_bytes(damage)
    else:
        damage(run / name)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The only line that is printed."""
    assert main([*map(str, words)]) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert output.out == "" and line.startswith("report: ") and line.isprintable()
    return line


PAGE = set("!doctype html head meta title style body h1 h2 p b br div span table thead tbody tr th td".split())
PAGE |= {"figure", "figcaption"}
FIGURE = set("svg defs g path use clippath rect text line".split())


def assert_harmless(text: str) -> None:
    """Nothing of a run is markup: the page has no other elements than its own."""
    assert set(re.findall(r"<([a-z!]\w*)", text.lower())) <= PAGE | FIGURE
    assert set(re.findall(r"<[^>]* (on\w+)=", text)) == set()


@pytest.mark.parametrize("case", REFUSED)
def test_one_line_names_a_damaged_file(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, damage = REFUSED[case]
    run = made(tmp_path / "run")
    damaged(run, name, damage)
    line = refused(capsys, run)
    assert str(run / name).rpartition("_n")[0] in line or str(run / name) in line or f"{run}/csv/out_r" in line
    assert len(line) < 450 + len(str(run)), "no content of the file"
    assert not (run / "report.html").exists()


def test_strange_values_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = []
    for i, (case, (name, damage)) in enumerate(SHOWN.items()):
        run = made(tmp_path / f"{i} <i>")
        damaged(run, name, damage)
        words.append(f"{'<u>=' if 'labelled' in case else ''}{run}")
    assert main([*words, "--out", str(tmp_path / "page")]) == 0
    assert capsys.readouterr().err == ""
    text = (tmp_path / "page").read_text(encoding="utf-8")
    assert_harmless(text)
    for expected in (EVIL, "<u>", f"{tmp_path}/0 <i>", "1" + "0" * 29):
        assert escape(expected) in text
    assert main([words[0]]) == 0
    assert_harmless(Path(words[0], "report.html").read_text(encoding="utf-8"))


def test_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("empty", "file", "absent", "a\nb\x1b", "\udcff"):
        assert ascii(name)[1:-1] in ascii(refused(capsys, tmp_path / name)) or not name.isprintable()
    run = made(tmp_path / "run")
    damaged(run, LOG, Path.unlink)
    run.joinpath("csv").rmdir()
    run.joinpath("csv").write_text("")
    run.joinpath("config.yaml").unlink()
    assert f"{run} has neither CSV files" in refused(capsys, run)
    (tmp_path / "out").mkdir()
    assert str(tmp_path / "out") in refused(capsys, made(tmp_path / "good"), "--out", tmp_path / "out")
    with pytest.raises(SystemExit):
        main([])


def test_files_that_may_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read = made(tmp_path / "run"), Path.read_text
    for name in ("summary.json", "config.yaml", LOG):

        def denied(path: Path, *given: Any, name: str = name, **options: Any) -> str:
            if path == run / name:
                raise PermissionError(13, "Permission denied", str(path))
            return read(path, *given, **options)

        monkeypatch.setattr(Path, "read_text", denied)
        assert f"{run / name} cannot be read: Permission denied" in refused(capsys, run)


def written(path: Path, changes: dict[str, list[float]]) -> Path:
    """A run with TensorBoard files alone."""
    path.mkdir()
    (path / "config.yaml").write_bytes(config())
    points = {"time/elapsed": [1.0, 2.0], "train/steps": [4.0, 8.0], "bytes/wire": [10.0, 20.0]}
    points |= {METRIC: [50.0, 60.0], "train/loss": [2.0, 1.0], **changes}
    with SummaryWriter(path) as writer:
        settings = {"ranks": 2, "train.batch_size": 8, "train.num_batches_per_step": 1, "train.metric": METRIC}
        writer.file_writer.add_summary(_session(settings))
        for i in range(2):
            for name, values in points.items():
                if i < len(values):
                    writer.add_scalar(name, values[i], 8 * (i + 1))
    return path


def _session(settings: dict[str, Any]) -> Any:
    from torch.utils.tensorboard.summary import hparams

    return hparams(settings, {})[1]


def test_damaged_tensorboard_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nan, inf = float("nan"), float("inf")
    changes: tuple[dict[str, list[float]], ...] = (
        {"train/steps": []}, {"train/steps": [4.0]}, {"train/steps": [0.0, 0.0]}, {"train/steps": [nan, nan]},
        {"train/steps": [-4.0, 8.0]}, {"bytes/wire": []}, {"bytes/wire": [nan, inf]}, {"time/elapsed": [1.0, inf]},
        {"time/elapsed": [-1.0, -2.0]}, {"time/data": [nan, 1.0]}, {"bytes/wire_per_step": [inf, 1.0]},
    )  # fmt: skip
    for i, change in enumerate(changes):
        run = written(tmp_path / f"run{i}", change)
        assert f"the TensorBoard files in {run} are damaged" in refused(capsys, run), change
    good: list[dict[str, list[float]]] = [
        {METRIC: [inf, nan]}, {"train/loss": [inf, -inf]}, {"train/loss": []}, {METRIC: []}
    ]  # fmt: skip
    words = [str(written(tmp_path / f"good{i}", change)) for i, change in enumerate(good)]
    assert main([*words, "--out", str(tmp_path / "page")]) == 0
    capsys.readouterr()
    run = written(tmp_path / "garbage", {})
    (events,) = run.glob("events*")
    content = events.read_bytes()
    for damage in (b"", bytes(200), bytes(range(256)) * 4, content[:100] + bytes(50) + content[150:]):
        events.write_bytes(damage)
        assert main([str(run)]) in (0, 2), damage
        assert capsys.readouterr().err.count("\n") <= 1
    events.unlink()
    events.mkdir()
    assert main([str(run)]) in (0, 2)
