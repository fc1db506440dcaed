"""`scripts.report` on damaged runs: each is one line that names the file and the reason, or a page without markup
of its own. No case is a traceback."""

import json
import re
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import case
from csv_logs import HEAD, ROWS, csv_log
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from scripts.report import main

EVIL = "<script>alert('x')</script>"
METRIC = "acc/test_top1"
SUMMARY = {"epochs": 2, "metric": METRIC, "final": {METRIC: 55.0}, "best": {METRIC: 60.0}, "best_epoch": 1}
DENSE = {"_target_": "dgc.compression.DenseCompressor"}
CONFIG = {"train": {"metric": METRIC, "num_epochs": 2, "compression": DENSE}}
LOG = "csv/out_r0_n1.csv"
NAN, INF = float("nan"), float("inf")
Damage = bytes | Callable[[Path], Any]


def summary(**changes: Any) -> bytes:
    return json.dumps({**SUMMARY, **changes}).encode()


def config(**changes: Any) -> bytes:
    return yaml.safe_dump({**CONFIG, "train": {**CONFIG["train"], **changes}}).encode()


def log(*rows: str, **changes: str) -> bytes:
    return csv_log(*(rows or ROWS), **changes).encode()


def row(**changes: str) -> bytes:
    """A log in which a column of the second row has another value."""
    cells = dict(zip(HEAD.split(","), ROWS[1].split(","), strict=True))
    assert set(changes) <= set(cells)
    return log(ROWS[0], ",".join({**cells, **changes}.values()), ROWS[2])


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
# What the report refuses with one line that names the file: a whole file that is damaged, ...
FILES: dict[str, list[Damage]] = {
    "summary.json": [
        summary()[:40], '{"metric": "é'.encode()[:-1], bytes(100), summary().decode().encode("utf-16"), b"[]",
        b"3", b"null", b'"epochs"', b"{}", b'{"loss": 3}', summary() * 2, b'{"epochs": 1, "a": ' + b"[" * 100_000,
        b'{"epochs": ' + b"9" * 10_000 + b"}",
    ],
    "config.yaml": [
        b"train: {metric: ", b"train: \x01", b"- 1\n- 2\n", b"train", b"train:\n\tmetric: 3\n", b"train: 5",
        b"train: [1]", b"train: {num_epochs: 2}", b"train: !!python/object/apply:os.system ['true']",
        b"? [1, 2]\n: 3\n? {a: b}\n: 4\n", b"train: 2001-99-99", b"train: *there", b"train: &a {b: *a}",
        BOMB.encode(), b"[" * 20_000, b"train: {num_epochs: " + b"9" * 10_000 + b"}", b"seed: 0x" + b"f" * 10_000,
    ],
    LOG: [
        b"BEGIN-TRAINING\n", log(head=HEAD.replace("Loss", "Cost")), log(start="BEGIN"), log(batch="Batch,8"),
        log(batch="Batch-Size,x"), log(batch="Batch-Size,0"), log(""), log(ROWS[2]), log(ROWS[0], "0,1", ROWS[2]),
        renamed("out_r5_n2.csv"), renamed("out_r0_n0.csv"),
    ],
}  # fmt: skip
# ... one value of the summary, of the config's train, and of a row
VALUES: dict[str, list[tuple[str, list[Any]]]] = {
    "summary.json": [
        ("epochs", [EVIL, NAN, INF, -1, True, [2], 10**400]), ("best_epoch", [EVIL]), ("wire_bytes", ["400", NAN]),
        ("dropped_steps", [EVIL, {EVIL: 1}]), ("final", [55.0, [55.0], {METRIC: EVIL}]), ("metric", [[METRIC]]),
        ("best", [{METRIC: [60.0]}, METRIC]), ("dense_wire_bytes", [EVIL, 1e300]), ("lower_is_better", ["no"]),
    ],
    "config.yaml": [
        ("num_epochs", [EVIL, [2], NAN, 10**300]), ("metric", [5]), ("meters", [[METRIC], {METRIC: "_target_"}]),
        ("compression", ["_target_", {"_target_": 5}, {"_target_": {"a": 1}}]), ("gossip", [["_target_"]]),
    ],
    LOG: [
        ("Epoch", ["nan", "inf", "9" * 400, "-3"]), ("itr", ["inf", "1e300"]), ("BT(s)", ["nan", "inf"]),
        ("Loss", [EVIL]), ("wire_bytes", ["-5e20"]), ("wait(s)", ["inf"]), ("elapsed(s)", ["1e305"]),
    ],
}  # fmt: skip
NO_ALGORITHMS = {"_target_": "dgc.local.OuterSteps", "base": 5, "outer": [EVIL], "compression": EVIL}
# damages with which the report is written
SHOWN: dict[str, list[Damage]] = {
    "summary.json": [
        Path.unlink,
        json.dumps(dict.fromkeys(SUMMARY) | {"epochs": 2}).encode(),
        summary(final={METRIC: NAN}, best={METRIC: NAN}),
        summary(final={METRIC: 1e308}, best={METRIC: -INF}),
        summary(best_epoch=None),
        summary(dropped_steps=10**29),
        summary(metric=EVIL, final={EVIL: 1.0}, best={EVIL: 1.0}),
        b'{"epochs": 2, "metric": "\\ud800"}',  # half of a surrogate pair
        summary(**{EVIL: EVIL}),
    ],
    "config.yaml": [
        Path.unlink,
        config(num_epochs="${derive:" + EVIL + "}"),
        config(metric=EVIL),
        config(compression={"_target_": EVIL}),
        config(local=NO_ALGORITHMS),
        config() + b"5: {null: 1, 2.5: <b>}\n2001-01-01: 3\n",
        config() + b"a: !!binary aGk=\nb: !!set {x, y}\n",
        config(kernels="a\x1b[31m\u202e\x00"),
    ],
    LOG: [
        log()[:-9],
        *(row(Loss=value) for value in ("nan", "inf", "-1e308")),
        log(*(re.sub(",[23],([56]0)", r",nan,\1", line) for line in ROWS)),  # every loss
        log(*(re.sub(r"^(0,-?\d),2,1,2", r"\1,0,0,0", line) for line in ROWS)),  # 0 seconds
        log(*(line.replace(",100,", ",-1,").replace(",300,", ",-1,") for line in ROWS)),  # unknown bytes
        log(*ROWS, *ROWS),
        log().replace(b"\n", b"\r\n"),
    ],
}


def made(path: Path) -> Path:
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


def damages(name: str) -> Iterator[Damage]:
    yield from (b"", bytes(range(256)) * 4, directory, loop, *FILES[name])
    make: Any = {"summary.json": summary, "config.yaml": config, LOG: row}[name]
    yield from (make(**{key: value}) for key, wrong in VALUES[name] for value in wrong)


@pytest.mark.parametrize("name", FILES)
def test_one_line_names_a_damaged_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, damage in enumerate(damages(name)):
        with case(number, damage if callable(damage) else damage[:200]):
            run = made(tmp_path / f"run{number}")
            damaged(run, name, damage)
            line = refused(capsys, run)
            assert str(run / name) in line or f"{run}/csv/out_r" in line
            assert ("Remove it: the run then counts as unfinished" in line) == (name == "summary.json")
            assert len(line) < 450 + len(str(run)), "no content of the file"
            assert not (run / "report.html").exists()


def test_strange_values_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words: list[str] = []
    for name, strange in SHOWN.items():
        for damage in strange:
            run = made(tmp_path / f"{len(words)} <i>")
            damaged(run, name, damage)
            without_config = not (run / "config.yaml").exists()
            words.append(f"{'<u>=' if without_config else ''}{run}")
    assert main([*words, "--out", str(tmp_path / "page")]) == 0
    assert capsys.readouterr().err == ""
    text = (tmp_path / "page").read_text(encoding="utf-8")
    assert_harmless(text)
    for expected in (EVIL, "<u>", f"{tmp_path}/0 <i>", "1" + "0" * 29):
        assert escape(expected) in text
    assert main([words[0]]) == 0
    assert_harmless(Path(words[0], "report.html").read_text(encoding="utf-8"))


def test_no_runs_and_files_that_may_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    run, page = made(tmp_path / "run"), tmp_path / "page"
    there_is_none = "there is no run directory"
    names = {"empty": "Give the directory of a run: runs/NAME.npN", "file": "", "absent": there_is_none}
    for name, message in {**names, "a\nb\x1b": there_is_none, "\udcff": there_is_none}.items():
        line = refused(capsys, run, tmp_path / name, "--out", page)
        assert message in line and (ascii(name)[1:-1] in ascii(line) or not name.isprintable())
        assert not page.exists()
    (tmp_path / "out").mkdir()
    assert str(tmp_path / "out") in refused(capsys, run, "--out", tmp_path / "out")
    read = Path.read_text
    for name in ("summary.json", "config.yaml", LOG):

        def denied(path: Path, *given: Any, name: str = name, **options: Any) -> str:
            if path == run / name:
                raise PermissionError(13, "Permission denied", str(path))
            return read(path, *given, **options)

        monkeypatch.setattr(Path, "read_text", denied)
        assert f"{run / name} cannot be read: Permission denied" in refused(capsys, run)
    monkeypatch.undo()
    damaged(run, LOG, Path.unlink)
    run.joinpath("csv").rmdir()
    run.joinpath("csv").write_text("")
    run.joinpath("config.yaml").unlink()
    assert f"{run} has neither CSV files" in refused(capsys, run)
    with pytest.raises(SystemExit):
        main([])


def written(path: Path, changes: dict[str, list[float]]) -> Path:
    """A run with TensorBoard files alone."""
    path.mkdir()
    (path / "config.yaml").write_bytes(config())
    points = {"time/elapsed": [1.0, 2.0], "train/steps": [4.0, 8.0], "bytes/wire": [10.0, 20.0]}
    points |= {METRIC: [50.0, 60.0], "train/loss": [2.0, 1.0], **changes}
    with SummaryWriter(path) as writer:
        settings = {"ranks": 2, "train.batch_size": 8, "train.num_batches_per_step": 1, "train.metric": METRIC}
        writer.file_writer.add_summary(hparams(settings, {})[1])
        for i in range(2):
            for name, values in points.items():
                if i < len(values):
                    writer.add_scalar(name, values[i], 8 * (i + 1))
    return path


def test_damaged_tensorboard_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: tuple[dict[str, list[float]], ...] = (
        {"train/steps": []}, {"train/steps": [4.0]}, {"train/steps": [0.0, 0.0]}, {"train/steps": [NAN, NAN]},
        {"train/steps": [-4.0, 8.0]}, {"bytes/wire": []}, {"bytes/wire": [NAN, INF]}, {"time/elapsed": [1.0, INF]},
        {"time/elapsed": [-1.0, -2.0]}, {"time/data": [NAN, 1.0]}, {"bytes/wire_per_step": [INF, 1.0]},
    )  # fmt: skip
    for i, change in enumerate(changes):
        run = written(tmp_path / f"run{i}", change)
        assert f"the TensorBoard files in {run} are damaged" in refused(capsys, run), change
    good: list[dict[str, list[float]]] = [
        {METRIC: [INF, NAN]}, {"train/loss": [INF, -INF]}, {"train/loss": []}, {METRIC: []}
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
