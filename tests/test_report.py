"""The report: its content, unfinished runs, what Chromium makes of it, and damaged runs."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import case
from environment import patient
from simulated import CNN, summary_of, train_in
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from dgc_training.logging.formatting import human_bytes
from scripts import plot
from scripts.plot import find_runs
from scripts.report import main
from scripts.report_figures import shortened
from scripts.report_page import page, seconds, sent
from scripts.report_runs import PHASES, differing_settings, disjoint, read_reported

HEAD = "Epoch,itr,BT(s),DT(s),avg:BT(s),Loss,avg:Prec@1,val,wire_bytes,wait(s),elapsed(s)"
ROWS = ["0,0,2,1,2,3,50,-1,100,0.5,2", "0,1,2,1,2,2,60,-1,300,0.5,4", "0,-1,2,1,2,2,60,55,0,0,4"]
METRIC, BITS, LOG = "acc/test_top1", "bits_per_character/test", "csv/out_r0_n1.csv"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
Patch = pytest.MonkeyPatch
Printed = pytest.CaptureFixture[str]
FIGURES = ["epochs", "bytes", "time", "loss", "traffic", "phases"]
SHORT, EVIL = ["train.num_epochs=2", "train.batch_size=90", "model.width=8"], "<script>alert('x')</script>"
SUMMARY = {"epochs": 2, "metric": METRIC, "final": {METRIC: 55.0}, "best": {METRIC: 60.0}, "best_epoch": 1}
TRAIN = {"metric": METRIC, "num_epochs": 2, "compression": {"_target_": "dgc.compression.DenseCompressor"}}
NAN, INF = float("nan"), float("inf")
Damage = bytes | Callable[[Path], Any]
PAGE = set("!doctype html head meta title style body h1 h2 p b br div span table thead tbody tr th td".split())
PAGE |= set("figure figcaption svg defs g path use clippath rect text line".split())


def log(*rows: str, head: str = HEAD, start: str = "BEGIN-TRAINING", batch: str = "Batch-Size,8") -> bytes:
    """A CSV log of one rank: these rows, or two steps of an epoch and its validation."""
    return "\n".join([start, "World-Size,1", "Num-DLWorkers,0", batch, head, *(rows or ROWS), ""]).encode()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("runs") / name for name in ("dense", "dgc")}
    for name, more in (("dense", []), ("dgc", ["configs/dgc/wm5.py"])):
        train_in(found[name], [CNN, *more], SHORT)
    return found


def copy(run: Path, to: Path, *without: str) -> Path:
    return Path(shutil.copytree(run, to, ignore=shutil.ignore_patterns("checkpoints", *without)))


def table(text: str) -> list[list[str]]:
    """The cells of a page's tables, by row, without markup."""
    rows = [re.findall("<t[dh].*?>(.*?)</t[dh]>", row, re.S) for row in re.findall("<tr>.*?</tr>", text, re.S)]
    return [[unescape(re.sub("<.*?>", "", cell)) for cell in row] for row in rows]


def by_name(text: str) -> dict[str, list[str]]:
    return {name: cells for name, *cells in table(text)}


def test_the_results_of_two_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    text = page(read_reported([f"plain={runs['dense']}", str(runs["dgc"])]))
    rows, dense, dgc = by_name(text), summary_of(runs["dense"]), summary_of(runs["dgc"])
    for name, summary in (("plain", dense), ("DGC", dgc)):
        ranks, epochs, final, best, _, _, _, rate = rows[name]
        assert (ranks, epochs) == ("2", "2") and float(rate.replace(",", "")) > 0
        assert final == f"{summary['final'][METRIC]:.2f}" and summary["lower_is_better"] is False
        assert best == f"{summary['best'][METRIC]:.2f} ({summary['best_epoch']})"
    assert rows["plain"][5].endswith("(as dense)")
    assert rows["DGC"][5].endswith(f"({dgc['dense_wire_bytes'] / dgc['wire_bytes']:.3g}× fewer)")
    assert dense["wire_bytes"] == dense["dense_wire_bytes"]
    assert rows["train.compression"][0] == "DenseCompressor()"
    assert rows["train.compression"][1].startswith("DGCCompressor(compress_ratio=0.001, warmup_epochs=5")
    assert set(rows) == {"run", "plain", "DGC", "", "train.compression", "train.optimizer"}
    bold = re.findall("<b>([^<]*)", text)
    assert human_bytes(dgc["wire_bytes"]) in bold and human_bytes(dense["wire_bytes"]) not in bold
    assert re.findall(r'<figure class="[^"]*" id="(\w+)">', text) == FIGURES
    assert "unfinished" not in text and "acc/test_top1,<br>final (%)</th>" in text
    # beyond 5 runs each has a row in the table of settings, and beyond 8 the kinds of lines differ
    text = page(read_reported([*[f"{letter}={runs['dgc']}" for letter in "abcdefgh"], f"last={runs['dense']}"]))
    cells = table(text)
    assert cells[10] == ["", "train.compression", "train.optimizer"]
    assert [row[0] for row in cells[11:]] == [*"abcdefgh", "last"] and cells[-1][1] == "DenseCompressor()"
    marks = re.findall(r'class="swatch" style="([^"]*)"', text)
    assert len(marks) == 3 * 9 and len(set(marks)) == 9


def test_the_times_of_a_run(runs: dict[str, Path]) -> None:
    (run,) = read_reported([str(runs["dgc"])])
    assert run.traffic.steps[-1] == 16 and run.seconds is not None and 0 < run.seconds < run.summary["seconds"]
    assert list(run.phases) == list(PHASES) and min(run.phases.values()) >= 0
    assert sum(run.phases.values()) == pytest.approx(run.seconds / 16, rel=1e-3)
    assert run.phases["forward_backward"] > 0 and run.phases["compress"] > 0


def test_the_quality_of_a_run(runs: dict[str, Path]) -> None:
    (run,) = read_reported([str(runs["dgc"])])
    assert len(run.quality) == 2
    assert run.quality[-1] == pytest.approx(run.summary["final"][METRIC], abs=1e-4)


def test_what_two_phases_counted_is_shown_once() -> None:
    """It was counted in a phase of its own and in forward_backward."""
    logged = dict.fromkeys(PHASES, 0.0) | {"forward_backward": 6.0, "compress": 3.0, "step": 2.0}
    for step, once, other in ((10.0, 5.0, 0.0), (12.0, 6.0, 1.0)):
        assert disjoint(logged, step=step) == logged | {"forward_backward": once, "other": other}


def test_the_plots_of_a_run_without_csv_files(runs: dict[str, Path], tmp_path: Path, capsys: Printed) -> None:
    plotted, summary = plot.read(str(runs["dgc"])), json.loads((runs["dgc"] / "summary.json").read_text())
    assert (plotted.label, plotted.ranks, plotted.batch) == ("DGC", 2, 90) and plotted.training.y == []
    curve = plotted.validation
    assert curve.steps == [8, 16] and plotted.loss.steps[-1] == 16
    assert curve.y[-1] == pytest.approx(summary["final"][METRIC], abs=1e-4)
    assert curve.wire[-1] == pytest.approx(summary["wire_bytes"], rel=1e-6)
    assert 0 < curve.seconds[0] < curve.seconds[1] < summary["seconds"]
    assert plot.main([str(runs["dgc"]), "--out", str(tmp_path), "--formats", "svg"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_an_unfinished_run(runs: dict[str, Path], tmp_path: Path, capsys: Printed) -> None:
    directory = copy(runs["dgc"], tmp_path / "killed", "summary.json")
    finished, unfinished = read_reported([str(runs["dgc"]), f"killed={directory}"])
    assert unfinished.final == pytest.approx(finished.final, abs=1e-4) and unfinished.epochs == 2
    assert unfinished.best is not None and finished.best is not None and unfinished.best[1] == finished.best[1]
    assert unfinished.wire_bytes == pytest.approx(finished.wire_bytes, rel=1e-6)
    assert unfinished.dense_wire_bytes == pytest.approx(finished.dense_wire_bytes, rel=1e-6)
    assert main([f"killed={directory}"]) == 0
    text = (directory / "report.html").read_text()
    assert "killed is unfinished: it has no summary.json. It is shown after 2 of 2 epochs." in text
    assert capsys.readouterr().out == f"{directory / 'report.html'}: 1 run\n"
    new = copy(runs["dgc"], tmp_path / "new", "summary.json", "events*")
    text, alone = page(read_reported([str(runs["dense"]), str(new)])), page(read_reported([f"mine={new}"]))
    assert "new has not logged a step yet." in text and "mine has not logged a step yet." in alone
    assert by_name(text)["new"][:4] == ["–", "0 of 2unfinished", "–", "–"] and "<figure" not in alone
    # The TensorBoard file of a killed one ends anywhere, also within a point. Only complete points are shown.
    directory = copy(runs["dgc"], tmp_path / "cut", "summary.json", "events*")
    (events,) = runs["dgc"].glob("events*")
    content, shown = events.read_bytes(), []
    within = [found.start() for found in re.finditer(b"time/(elapsed|step)|bytes/wire|train/steps", content)]
    for size in sorted([*range(0, len(content), len(content) // 40), *within]):
        (directory / events.name).write_bytes(content[:size])
        (run,) = read_reported([str(directory)])
        shown.append(0.0 if run.run is None else run.run.loss.steps[-1])
        assert run.run is None or (run.run.loss.steps == run.traffic.steps and run.epochs <= 2)
        assert run.run is None or sum(run.phases.values()) * shown[-1] == pytest.approx(run.seconds, rel=1e-3)
    assert shown == sorted(shown) and shown[0] == 0.0 and len(set(shown)) == 3
    page([run])


def test_what_a_user_wrote_is_escaped(runs: dict[str, Path], tmp_path: Path) -> None:
    """And what looks like a formula of TeX is none."""
    evil, directory = "<script>alert('$x$ &')</script>", copy(runs["dgc"], tmp_path / "<b>")
    tree = yaml.safe_load((directory / "config.yaml").read_text())
    tree["train"]["kernels"] = evil
    (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    text = page(read_reported([f"{evil}={directory}", str(runs["dense"])]), [evil])
    assert "<script" not in text and "<b>/" not in text and "/<b>" not in text
    assert by_name(text)["train.kernels"] == [evil, "auto"] and evil in by_name(text)


def test_the_same_runs_give_the_same_file(runs: dict[str, Path], tmp_path: Path) -> None:
    words = [str(run) for run in runs.values()]
    assert [main([*words, "--out", str(tmp_path / "new" / name)]) for name in "ab"] == [0, 0]
    text, again = ((tmp_path / "new" / name).read_text() for name in "ab")
    assert text == again
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text)) <= set(ids)
    assert not re.search(r"#0e0f\w\w", text) and "https:" not in re.sub(r'xmlns\S*="[^"]*"', "", text)


def test_settings_that_differ_are_listed(runs: dict[str, Path]) -> None:
    base, other, bare = read_reported([str(runs["dgc"])] * 3)
    other.config, bare.config = json.loads(json.dumps(base.config)), {}
    assert differing_settings([base, other, bare]) == []
    other.config["train"]["compression"]["compress_ratio"] = 0.01
    other.config["train"]["scheduler"]["T_max"] = "${derive:other}"  # derived: its source is listed instead
    other.config["train"]["gossip"] = {"_target_": "absent.module.Gossip", "graph": "ring", "seed": "${seed}"}
    del other.config["model"]["width"]
    assert dict(differing_settings([base, other, bare])) == {
        "model.width": ["8", "–", "–"],
        "train.compression.compress_ratio": ["0.001", "0.01", "–"],
        "train.gossip": ["None", "{_target_: absent.module.Gossip, graph: ring}", "–"],
    }
    assert "different models or data (model.width): do not compare" in page([base, other])


def test_a_run_with_csv_files_only(tmp_path: Path) -> None:
    """As after training with configs/gossip, when the TensorBoard files were removed: seconds, data and waits."""
    (tmp_path / "csv").mkdir()
    (tmp_path / LOG).write_bytes(log())
    (run,) = read_reported([f"old={tmp_path}"])
    assert run.quality == [55.0] and run.traffic.wire == [100.0, 300.0] and run.dense_wire_bytes is None
    assert run.phases == dict.fromkeys(PHASES, 0.0) | {"data": 1.0, "wait": 0.5, "other": 0.5}
    assert by_name(page([run]))["old"] == ["1", "1", "55.00", "55.00 (1)", "300 B", "400 B", "4 s", "4"]
    assert [seconds(value) for value in (None, 1.234, 75, 7260)] == ["–", "1.23 s", "1 min 15 s", "2 h 01 min"]
    assert sent(None, 1.0) == sent(float("nan"), 1.0) == "–" and sent(0, 0) == "0 B"
    ratios = [re.sub("<.*?>", " ", sent(wire, 1000.0)) for wire in (10, 1000, 2000)]
    assert ratios == ["10 B (100× fewer) ", "1.00 kB (as dense) ", "2.00 kB (2× dense) "]


def test_fewer_bits_are_better(tmp_path: Path) -> None:
    """Also in a summary without the direction, and without a summary."""
    curves = {"good": [2.5, 1.7, 1.8], "bad": [3.9, 3.45, 3.5], "unfinished": [4.0, 2.6, 3.0]}
    meter = {"bits_per_character/{}": {"_target_": "dgc_training.meters.BitsPerToken"}}
    row = "{0},0,2,1,2,3,50,-1,100,0,{1}\n{0},-1,2,1,2,2,60,{2},0,0,{1}"
    for direction, meters in (({"lower_is_better": True}, meter), ({}, {})):
        words = []
        for name, values in curves.items():
            rows = [row.format(epoch, 2 * epoch + 2, value) for epoch, value in enumerate(values)]
            directory = made(tmp_path / str(len(meters)) / name, LOG, log(*rows))
            (directory / "config.yaml").write_bytes(config(metric=BITS, num_epochs=5, meters=meters))
            reached = {"final": {BITS: values[-1]}, "best": {BITS: min(values)}, "best_epoch": 2, **direction}
            (directory / "summary.json").write_bytes(summary(metric=BITS, epochs=len(values), **reached))
            if name == "unfinished":
                (directory / "summary.json").unlink()
            words.append(f"{name}={directory}")
        text, head = page(read_reported(words)), [f"{BITS},final", f"{BITS},best (epoch)"]
        expected = [["1.80", "1.70 (2)"], ["3.50", "3.45 (2)"], ["3.00", "2.60 (2)"]]
        assert [row[3:5] for row in table(text)[:4]] == [head, *expected]
        assert re.findall("<b>([^<]*)", text) == expected[0]
        assert not re.search(r">%<|\(%\)", text), "no percentage"
    runs = read_reported(words)
    for run, metric, value in zip(runs, (BITS, "acc/test_top1", BITS), (1.7, 90.0, 2.6), strict=True):
        run.config["train"]["metric"] = metric
        run.summary |= {"final": {metric: value}, "best": {metric: value}} if run.summary else {}
    text = page(runs)
    assert "different metrics" in text and "<b>" not in text


def chromium(tmp_path: Path, file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--no-first-run", "--enable-logging=stderr"]
    command += [f"--disable-{of}" for of in ("quic", "background-networking", "component-update", "sync", "gpu")]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,1900", *options, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=patient(100), check=True)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on PATH, which is not installed")
def test_in_a_browser(runs: dict[str, Path], tmp_path: Path) -> None:
    """Every figure has a size, the page fits its window, nothing is fetched, and the console is silent."""
    file = tmp_path / "report.html"
    assert main([*map(str, runs.values()), "--out", str(file)]) == 0
    shown = chromium(tmp_path, file, f"--screenshot={tmp_path / 'report.png'}")
    assert "CONSOLE" not in shown.stderr and (tmp_path / "report.png").stat().st_size > 50_000
    # The page's own policy forbids scripts, so that a copy without it measures the page.
    text = file.read_text()
    policy = re.search(r"<meta http-equiv=.*?>\n", text)
    assert policy is not None and "default-src 'none'" in policy[0]
    script = """<script>
        const box = item => { const b = item.getBoundingClientRect(); return [b.width, b.height]; };
        document.body.textContent = "MEASURED" + JSON.stringify({
            figures: [...document.querySelectorAll("figure svg")].map(box),
            texts: [...document.querySelectorAll("svg text")].map(box),
            strokes: [...document.querySelectorAll("svg path")].map(path => getComputedStyle(path).stroke),
            fetched: performance.getEntriesByType("resource").map(entry => entry.name),
            overflow: document.documentElement.scrollWidth - innerWidth,
        }) + "END";
    </script>"""
    measuring = tmp_path / "measuring.html"
    measuring.write_text(text.replace(policy[0], "").replace("</body>", f"{script}</body>"))
    shown = chromium(tmp_path, measuring, "--dump-dom")
    assert "CONSOLE" not in shown.stderr
    found = json.loads(shown.stdout.split("MEASURED")[1].split("END")[0])
    assert len(found["figures"]) == len(FIGURES) and all(w > 300 and h > 90 for w, h in found["figures"])
    assert len(found["texts"]) > 40 and all(w > 0 and h > 5 for w, h in found["texts"])
    assert {"rgb(42, 111, 219)", "rgb(217, 72, 15)"} <= set(found["strokes"])
    assert found["fetched"] == [] and found["overflow"] <= 0


def summary(**changes: Any) -> bytes:
    return json.dumps({**SUMMARY, **changes}).encode()


def config(**changes: Any) -> bytes:
    return yaml.safe_dump({"train": {**TRAIN, **changes}}).encode()


def row(**changes: str) -> bytes:
    """A log in which a column of the second row has another value."""
    cells = dict(zip(HEAD.split(","), ROWS[1].split(","), strict=True))
    assert set(changes) <= set(cells)
    return log(ROWS[0], ",".join({**cells, **changes}.values()), ROWS[2])


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)
# What the report refuses with one line that names the file: a whole file that is damaged, ...
FILES: dict[str, list[Damage]] = {
    "summary.json": [
        summary()[:40],
        '{"metric": "é'.encode()[:-1],
        bytes(100),
        summary().decode().encode("utf-16"),
        b"[]",
        b"3",
        b"null",
        b'"epochs"',
        b"{}",
        b'{"loss": 3}',
        summary() * 2,
        b'{"epochs": 1, "a": ' + b"[" * 100_000,
        b'{"epochs": ' + b"9" * 10_000 + b"}",
    ],
    "config.yaml": [
        b"train: {metric: ",
        b"train: \x01",
        b"- 1\n- 2\n",
        b"train",
        b"train:\n\tmetric: 3\n",
        b"train: 5",
        b"train: [1]",
        b"train: {num_epochs: 2}",
        b"train: !!python/object/apply:os.system ['true']",
        b"? [1, 2]\n: 3\n? {a: b}\n: 4\n",
        b"train: 2001-99-99",
        b"train: *there",
        b"train: &a {b: *a}",
        BOMB.encode(),
        b"[" * 20_000,
        b"train: {num_epochs: " + b"9" * 10_000 + b"}",
        b"seed: 0x" + b"f" * 10_000,
    ],
    LOG: [
        b"BEGIN-TRAINING\n",
        log(head=HEAD.replace("Loss", "Cost")),
        log(start="BEGIN"),
        log(batch="Batch,8"),
        log(batch="Batch-Size,x"),
        log(batch="Batch-Size,0"),
        log(""),
        log(ROWS[2]),
        log(ROWS[0], "0,1", ROWS[2]),
        *(lambda path, to=to: path.rename(path.with_name(to)) for to in ("out_r5_n2.csv", "out_r0_n0.csv")),
    ],
}
# ... one value of the summary, of the config's train, and of a row
VALUES: dict[str, list[tuple[str, list[Any]]]] = {
    "summary.json": [
        ("epochs", [EVIL, NAN, INF, -1, True, [2], 10**400]),
        ("best_epoch", [EVIL]),
        ("wire_bytes", ["400", NAN]),
        ("dropped_steps", [EVIL, {EVIL: 1}]),
        ("final", [55.0, [55.0], {METRIC: EVIL}]),
        ("metric", [[METRIC]]),
        ("best", [{METRIC: [60.0]}, METRIC]),
        ("dense_wire_bytes", [EVIL, 1e300]),
        ("lower_is_better", ["no"]),
    ],
    "config.yaml": [
        ("num_epochs", [EVIL, [2], NAN, 10**300]),
        ("metric", [5]),
        ("meters", [[METRIC], {METRIC: "_target_"}]),
        ("compression", ["_target_", {"_target_": 5}, {"_target_": {"a": 1}}]),
        ("gossip", [["_target_"]]),
    ],
    LOG: [
        ("Epoch", ["nan", "inf", "9" * 400, "-3"]),
        ("itr", ["inf", "1e300"]),
        ("BT(s)", ["nan", "inf"]),
        ("Loss", [EVIL]),
        ("wire_bytes", ["-5e20"]),
        ("wait(s)", ["inf"]),
        ("elapsed(s)", ["1e305"]),
    ],
}
NO_ALGORITHMS = {"_target_": "dgc.local.OuterSteps", "base": 5, "outer": [EVIL], "compression": EVIL}
# damages with which the report is written
SHOWN: dict[str, list[Damage]] = {
    "summary.json": [
        Path.unlink,
        json.dumps(dict.fromkeys(SUMMARY) | {"epochs": 2}).encode(),
        summary(best_epoch=None),
        summary(final={METRIC: NAN}, best={METRIC: NAN}),
        summary(final={METRIC: 1e308}, best={METRIC: -INF}),
        summary(metric=EVIL, final={EVIL: 1.0}, best={EVIL: 1.0}),
        summary(**{EVIL: EVIL}),
        summary(dropped_steps=10**29),
        b'{"epochs": 2, "metric": "\\ud800"}',  # half of a surrogate pair
    ],
    "config.yaml": [
        Path.unlink,
        config(num_epochs="${derive:" + EVIL + "}"),
        config(metric=EVIL),
        config(local=NO_ALGORITHMS),
        config(compression={"_target_": EVIL}),
        config() + b"5: {null: 1, 2.5: <b>}\n2001-01-01: 3\n",
        config() + b"a: !!binary aGk=\nb: !!set {x, y}\n",
        config(kernels="a\x1b[31m\u202e\x00"),
    ],
    LOG: [
        log()[:-9],
        log(*ROWS, *ROWS),
        *(row(Loss=value) for value in ("nan", "inf", "-1e308")),
        log(*(re.sub(",[23],([56]0)", r",nan,\1", line) for line in ROWS)),  # every loss
        log(*(re.sub(r"^(0,-?\d),2,1,2", r"\1,0,0,0", line) for line in ROWS)),  # 0 seconds
        log(*(line.replace(",100,", ",-1,").replace(",300,", ",-1,") for line in ROWS)),  # unknown bytes
        log().replace(b"\n", b"\r\n"),
    ],
}


def made(path: Path, name: str = "", damage: Damage = b"") -> Path:
    """A run, of which the file of this name is damaged."""
    (path / "csv").mkdir(parents=True)
    for file, content in (("summary.json", summary()), ("config.yaml", config()), (LOG, log())):
        (path / file).write_bytes(damage if file == name and isinstance(damage, bytes) else content)
    if not isinstance(damage, bytes):
        damage(path / name)
    return path


def refused(capsys: Printed, *words: object) -> str:
    assert main([*map(str, words)]) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert output.out == "" and line.startswith("report: ") and line.isprintable()
    return line


def assert_harmless(text: str) -> None:
    """Nothing of a run is markup: the page has no other elements than its own."""
    assert set(re.findall(r"<([a-z!]\w*)", text.lower())) <= PAGE
    assert set(re.findall(r"<[^>]* (on\w+)=", text)) == set()


@pytest.mark.parametrize("name", FILES)
def test_one_line_names_a_damaged_file(name: str, tmp_path: Path, capsys: Printed) -> None:
    damages: list[Any] = [b"", bytes(range(256)) * 4, *FILES[name]]
    damages += [lambda path: (path.unlink(), path.mkdir()), lambda path: (path.unlink(), path.symlink_to(path))]
    make: Any = {"summary.json": summary, "config.yaml": config, LOG: row}[name]
    damages += [make(**{key: value}) for key, wrong in VALUES[name] for value in wrong]
    for number, damage in enumerate(damages):
        with case(number, damage if callable(damage) else damage[:200]):
            run = made(tmp_path / f"run{number}", name, damage)
            line = refused(capsys, run)
            assert str(run / name) in line or f"{run}/csv/out_r" in line
            assert ("Remove it: the run then counts as unfinished" in line) == (name == "summary.json")
            assert len(line) < 450 + len(str(run)), "no content of the file"
            assert not (run / "report.html").exists()


def test_strange_values_are_shown_as_text(tmp_path: Path, capsys: Printed) -> None:
    words: list[str] = []
    for name, strange in SHOWN.items():
        for damage in strange:
            run = made(tmp_path / f"{len(words)} <i>", name, damage)
            words.append(f"{'' if (run / 'config.yaml').exists() else '<u>='}{run}")
    assert main([*words, "--out", str(tmp_path / "page")]) == 0 and capsys.readouterr().err == ""
    text = (tmp_path / "page").read_text(encoding="utf-8")
    assert_harmless(text)
    for expected in (EVIL, "<u>", f"{tmp_path}/0 <i>", "1" + "0" * 29):
        assert escape(expected) in text
    assert main([words[0]]) == 0
    assert_harmless(Path(words[0], "report.html").read_text(encoding="utf-8"))


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: Printed) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    run, page = made(tmp_path / "run"), tmp_path / "page"
    there_is_none = "there is no run directory"
    assert "Give the directory of a run: runs/NAME.npN" in refused(capsys, tmp_path / "empty", "--out", page)
    assert there_is_none in refused(capsys, tmp_path / "file", "--out", page)
    for name, message in dict.fromkeys(("absent", "a\nb\x1b", "\udcff"), there_is_none).items():
        line = refused(capsys, run, tmp_path / name, "--out", page)
        assert message in line and (ascii(name)[1:-1] in ascii(line) or not name.isprintable())
        assert not page.exists()
    assert str(tmp_path / "empty") in refused(capsys, run, "--out", tmp_path / "empty")
    with pytest.raises(SystemExit):
        main([])


@pytest.mark.parametrize("name", ["summary.json", "config.yaml", LOG])
def test_a_file_that_may_not_be_read_is_named(
    name: str, tmp_path: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    run, read = made(tmp_path / "run"), Path.read_text

    def denied(path: Path, *given: Any, **options: Any) -> str:
        if path == run / name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *given, **options)

    monkeypatch.setattr(Path, "read_text", denied)
    assert f"{run / name} cannot be read: Permission denied" in refused(capsys, run)


def test_a_run_with_neither_csv_files_nor_settings_is_refused(tmp_path: Path, capsys: Printed) -> None:
    run = made(tmp_path / "run")
    shutil.rmtree(run / "csv")
    (run / "csv").write_text("")
    (run / "config.yaml").unlink()
    assert f"{run} has neither CSV files" in refused(capsys, run)


@pytest.fixture
def folder_of_runs(tmp_path: Path) -> list[str]:
    """What lies in a folder with four runs, two of which have the same name."""
    for name in ("demo/dense", "demo/dgc", "deeper/demo/dgc", "one"):
        made(tmp_path / "runs" / name)
    (tmp_path / "runs/plots").mkdir()
    (tmp_path / "runs/report.html").touch()
    return sorted(map(str, (tmp_path / "runs").iterdir()))


def test_what_has_no_run_is_left_out(folder_of_runs: list[str], tmp_path: Path, capsys: Printed) -> None:
    assert main([*folder_of_runs, "--out", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("page.html: 4 runs\n")
    for name in ("plots", "report.html"):
        assert f"report: {tmp_path / 'runs' / name} has no run and is left out" in printed.err


def test_equal_names_of_folders_are_told_apart(folder_of_runs: list[str]) -> None:
    with pytest.warns(UserWarning, match="has no run"):
        names = [run.name for run in read_reported(find_runs(folder_of_runs))]
    folders = ("deeper/demo/dgc", "runs/demo/dense", "runs/demo/dgc", "one")
    assert len({*names}) == 4 and all(name.endswith(f"{end})") for name, end in zip(names, folders, strict=True))


@pytest.mark.usefixtures("folder_of_runs")
def test_a_label_of_a_folder_is_the_label_of_its_run(tmp_path: Path, capsys: Printed) -> None:
    assert [run.name for run in read_reported(find_runs([f"mine={tmp_path / 'runs/deeper'}"]))] == ["mine"]
    assert "demo has 2 runs; give each its own label" in refused(capsys, f"mine={tmp_path / 'runs/demo'}")


def test_short_labels_of_bars_differ() -> None:
    same = [f"{'DGCCompressor, 0.1 %, ' * 3}on {ranks} ranks" for ranks in (2, 4)]
    labels = shortened([*same, "dense"])
    assert len({*labels}) == 3 and max(map(len, labels)) <= 40 and labels[2] == "dense"
    alike = [f"{'a' * 40}{middle}{'b' * 40}" for middle in "xy"]
    assert shortened(alike) == alike


def written(path: Path, changes: dict[str, list[float]]) -> Path:
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


def test_damaged_tensorboard_files(tmp_path: Path, capsys: Printed) -> None:
    changes: tuple[dict[str, list[float]], ...] = (
        {"train/steps": []},
        {"train/steps": [4.0]},
        {"train/steps": [0.0, 0.0]},
        {"train/steps": [NAN, NAN]},
        {"train/steps": [-4.0, 8.0]},
        {"bytes/wire": []},
        {"bytes/wire": [NAN, INF]},
        {"time/elapsed": [1.0, INF]},
        {"time/elapsed": [-1.0, -2.0]},
        {"time/data": [NAN, 1.0]},
        {"bytes/wire_per_step": [INF, 1.0]},
    )
    for i, change in enumerate(changes):
        run = written(tmp_path / f"run{i}", change)
        assert f"the TensorBoard files in {run} are damaged" in refused(capsys, run), change
    good: Any = ({METRIC: [INF, NAN]}, {"train/loss": [INF, -INF]}, {"train/loss": []}, {METRIC: []})
    words = [str(written(tmp_path / f"good{i}", change)) for i, change in enumerate(good)]
    assert main([*words, "--out", str(tmp_path / "page")]) == 0 and capsys.readouterr().err == ""
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
