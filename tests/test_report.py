"""The report: its content, escaping, unfinished runs, and what Chromium makes of it."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml
from csv_logs import ROWS, csv_log
from environment import patient
from simulated import CNN, summary_of, train_in

from dgc_training.logging.formatting import human_bytes
from scripts import plot
from scripts.plot_runs import is_lower_better, metric_of, unit_of
from scripts.report import main
from scripts.report_page import page, seconds, sent
from scripts.report_runs import PHASES, differing_settings, disjoint, read_reported

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FIGURES = ["epochs", "bytes", "time", "loss", "traffic", "phases"]
SHORT = ["train.num_epochs=2", "train.batch_size=90", "model.width=8"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two finished runs of 2 ranks, which no test may change."""
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
    rows = by_name(text)
    for name, directory in (("plain", "dense"), ("DGC", "dgc")):
        summary = summary_of(runs[directory])
        assert summary["lower_is_better"] is False
        ranks, epochs, final, best, _, _, _, rate = rows[name]
        assert (ranks, epochs) == ("2", "2") and float(rate.replace(",", "")) > 0
        assert final == f"{summary['final']['acc/test_top1']:.2f}"
        assert best == f"{summary['best']['acc/test_top1']:.2f} ({summary['best_epoch']})"
    dense, dgc = map(summary_of, (runs["dense"], runs["dgc"]))
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
    words = [f"{letter}={runs['dgc']}" for letter in "abcdefgh"]
    text = page(read_reported([*words, f"last={runs['dense']}"]))
    cells = table(text)
    assert cells[10] == ["", "train.compression", "train.optimizer"]
    assert [row[0] for row in cells[11:]] == [*"abcdefgh", "last"] and cells[-1][1] == "DenseCompressor()"
    marks = re.findall(r'class="swatch" style="([^"]*)"', text)
    assert len(marks) == 3 * 9 and len(set(marks)) == 9


def test_the_curves_and_times_of_a_run(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = read_reported([str(runs["dgc"])])
    summary = run.summary
    assert len(run.quality) == 2
    assert run.quality[-1] == pytest.approx(summary["final"]["acc/test_top1"], abs=1e-4)
    assert run.traffic.steps[-1] == 16
    assert run.seconds is not None and 0 < run.seconds < summary["seconds"]
    assert list(run.phases) == list(PHASES) and min(run.phases.values()) >= 0
    assert sum(run.phases.values()) == pytest.approx(run.seconds / 16, rel=1e-3)
    assert run.phases["forward_backward"] > 0 and run.phases["compress"] > 0
    # what was counted in a phase of its own and in forward_backward is shown once
    logged = dict.fromkeys(PHASES, 0.0) | {"forward_backward": 6.0, "compress": 3.0, "step": 2.0}
    twice, rest = disjoint(logged, step=10.0), disjoint(logged, step=12.0)
    assert twice["forward_backward"] == 5.0 and twice["other"] == 0.0 and sum(twice.values()) == 10.0
    assert rest["forward_backward"] == 6.0 and rest["other"] == 1.0
    # the plots of a run without CSV files
    plotted = plot.read(str(runs["dgc"]))
    assert (plotted.label, plotted.ranks, plotted.batch) == ("DGC", 2, 90) and plotted.training.y == []
    curve = plotted.validation
    assert curve.steps == [8, 16] and plotted.loss.steps[-1] == 16
    assert curve.y[-1] == pytest.approx(summary["final"]["acc/test_top1"], abs=1e-4)
    assert curve.wire[-1] == pytest.approx(summary["wire_bytes"], rel=1e-6)
    assert 0 < curve.seconds[0] < curve.seconds[1] < summary["seconds"]
    assert plot.main([str(runs["dgc"]), "--out", str(tmp_path), "--formats", "svg"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_an_unfinished_run(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    text = page(read_reported([str(runs["dense"]), str(new)]))
    assert "new has not logged a step yet." in text
    assert by_name(text)["new"][:4] == ["–", "0 of 2unfinished", "–", "–"]
    alone = page(read_reported([f"mine={new}"]))
    assert "mine has not logged a step yet." in alone and "<figure" not in alone


def test_a_killed_run(runs: dict[str, Path], tmp_path: Path) -> None:
    """Its TensorBoard file ends anywhere, also within a point. Only complete points are shown."""
    directory = copy(runs["dgc"], tmp_path / "killed", "summary.json", "events*")
    (events,) = runs["dgc"].glob("events*")
    content = events.read_bytes()
    shown = []
    within = [found.start() for found in re.finditer(b"time/(elapsed|step)|bytes/wire|train/steps", content)]
    for size in sorted([*range(0, len(content), len(content) // 40), *within]):
        (directory / events.name).write_bytes(content[:size])
        (run,) = read_reported([str(directory)])
        shown.append(0.0 if run.run is None else run.run.loss.steps[-1])
        assert run.run is None or (run.run.loss.steps == run.traffic.steps and run.epochs <= 2)
        assert run.run is None or sum(run.phases.values()) * shown[-1] == pytest.approx(run.seconds, rel=1e-3)
    assert shown == sorted(shown) and shown[0] == 0.0 and len(set(shown)) == 3
    page([run])


def test_settings_and_warnings_are_escaped(runs: dict[str, Path], tmp_path: Path) -> None:
    """And what looks like a formula of TeX is none. More text of runs is in test_malformed_runs.py."""
    evil = "<script>alert('$x$ &')</script>"
    directory = copy(runs["dgc"], tmp_path / "<b>")
    tree = yaml.safe_load((directory / "config.yaml").read_text())
    tree["train"]["kernels"] = evil
    (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    text = page(read_reported([f"{evil}={directory}", str(runs["dense"])]), [evil])
    assert "<script" not in text and "<b>/" not in text and "/<b>" not in text
    rows = by_name(text)
    assert rows["train.kernels"] == [evil, "auto"] and evil in rows
    # the same runs give the same file
    words = [str(run) for run in runs.values()]
    for name in ("a", "b"):
        assert main([*words, "--out", str(tmp_path / "new" / name)]) == 0
    text = (tmp_path / "new" / "a").read_text()
    assert text == (tmp_path / "new" / "b").read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text)) <= set(ids)
    assert not re.search(r"#0e0f\w\w", text) and "https:" not in re.sub(r'xmlns\S*="[^"]*"', "", text)


def test_settings_that_differ(runs: dict[str, Path]) -> None:
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


def test_a_run_with_csv_files_only(runs: dict[str, Path], tmp_path: Path) -> None:
    """As after training with configs/gossip, when the TensorBoard files were removed: seconds, data and waits."""
    directory = tmp_path / "csv_run"
    (directory / "csv").mkdir(parents=True)
    (directory / "csv" / "out_r0_n1.csv").write_text(csv_log(*ROWS))
    (run,) = read_reported([f"old={directory}"])
    assert run.quality == [55.0] and run.traffic.wire == [100.0, 300.0] and run.dense_wire_bytes is None
    assert run.phases == dict.fromkeys(PHASES, 0.0) | {"data": 1.0, "wait": 0.5, "other": 0.5}
    text = page([run])
    assert by_name(text)["old"] == ["1", "1", "55.00", "55.00 (1)", "300 B", "400 B", "4 s", "4"]


BITS = "bits_per_character/test"


def bits(directory: Path, name: str, values: list[float], old: bool, **summary: Any) -> Path:
    """The directory of a run that has reached these bits per character. old: its config has no meter."""
    run = directory / name
    (run / "csv").mkdir(parents=True)
    rows = [f"{e},0,2,1,2,3,50,-1,100,0,{2 * e + 2}\n{e},-1,2,1,2,2,60,{value},0,0,{2 * e + 2}"
            for e, value in enumerate(values)]  # fmt: skip
    (run / "csv" / "out_r0_n1.csv").write_text(csv_log(*rows))
    meters = {"bits_per_character/{}": {"_target_": "dgc_training.meters.BitsPerToken"}}
    tree = {"metric": BITS, "num_epochs": 5, "compression": {"_target_": "dgc.compression.DenseCompressor"}}
    (run / "config.yaml").write_text(yaml.safe_dump({"train": {**tree, "meters": {} if old else meters}}))
    if summary:
        (run / "summary.json").write_text(json.dumps({"metric": BITS, "epochs": len(values), **summary}))
    return run


def test_fewer_bits_are_better(tmp_path: Path) -> None:
    """Also in the summaries of earlier versions, which do not have the direction, and without a summary."""
    curves = {"good": [2.5, 1.7, 1.8], "bad": [3.9, 3.45, 3.5], "unfinished": [4.0, 2.6, 3.0]}
    for old in (False, True):
        words, direction = [], {} if old else {"lower_is_better": True}
        for name, values in curves.items():
            reached = {"final": {BITS: values[-1]}, "best": {BITS: min(values)}, "best_epoch": 2, **direction}
            summary = {} if name == "unfinished" else reached
            words.append(f"{name}={bits(tmp_path / str(old), name, values, old, **summary)}")
        text = page(read_reported(words))
        found = table(text)
        assert found[0][3:5] == [f"{BITS},final", f"{BITS},best (epoch)"]
        expected = [["1.80", "1.70 (2)"], ["3.50", "3.45 (2)"], ["3.00", "2.60 (2)"]]
        assert [row[3:5] for row in found[1:4]] == expected and re.findall("<b>([^<]*)", text) == expected[0]
        assert not re.search(r">%<|\(%\)", text), "no percentage"
    runs = read_reported(words)
    for run, metric, value in zip(runs, (BITS, "acc/test_top1", BITS), (1.7, 90.0, 2.6), strict=True):
        run.config["train"]["metric"] = metric
        run.summary |= {"final": {metric: value}, "best": {metric: value}} if run.summary else {}
    text = page(runs)
    assert "different metrics" in text and "<b>" not in text


def test_the_direction_and_the_unit_of_a_metric(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(
        "from dgc_training.config import Config, configs\nfrom dgc_training.meters import TokenLoss\n"
        "configs.train.meters = {'mine/{}': Config(TokenLoss)}\nconfigs.train.metric = 'mine/test'\n"
    )
    directory = tmp_path / "run"
    train_in(directory, [CNN, tmp_path / "loss.py"], ["train.num_epochs=1", "model.width=8"], size=1)
    assert summary_of(directory)["lower_is_better"] is True
    (directory / "summary.json").unlink()
    (run,) = read_reported([str(directory)])
    assert run.lower_is_better and not run.unit
    own = {"_target_": "dgc_training.meters.TopKClassMeter"}
    for name, meters, summary, lower, unit in (
        ("acc/test_top1", {"acc/{}_top1": own}, {}, False, "%"),
        ("mine/test", {"other/{}": own}, {}, False, ""),
        ("mine/test", {"mine/{}": own}, {}, False, "%"),
        ("mine/test", {"mine/{}": own}, {"lower_is_better": True}, True, "%"),
        ("mine/test", {"mine/{}": {"_target_": "dgc_training.meters.Perplexity"}}, {}, True, ""),
        ("loss/test", {"loss/{}": {"_target_": "absent.Meter"}}, {}, True, ""),
        ("translation/test_nll", None, {}, True, ""),
        ("translation/test_bleu", None, {}, False, ""),
        ("translation/test_exact_match", None, {}, False, "%"),
    ):
        config = {"train": {"metric": name, "meters": meters}}
        assert (is_lower_better(config, summary), unit_of(config, summary)) == (lower, unit), (name, meters)
    assert (is_lower_better({}, {}), unit_of({}, {}), metric_of({}, {})) == (False, "%", "top-1 accuracy")


def test_numbers_as_text() -> None:
    assert [seconds(value) for value in (None, 1.234, 75, 7260)] == ["–", "1.23 s", "1 min 15 s", "2 h 01 min"]
    assert sent(None, 1.0) == sent(float("nan"), 1.0) == "–" and sent(0, 0) == "0 B"
    ratios = [re.sub("<.*?>", " ", sent(wire, 1000.0)) for wire in (10, 1000, 2000)]
    assert ratios == ["10 B (100× fewer) ", "1.00 kB (as dense) ", "2.00 kB (2× dense) "]


def chromium(tmp_path: Path, file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    quiet = "quic", "background-networking", "component-update", "sync", "gpu"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--no-first-run", "--enable-logging=stderr"]
    command += [f"--disable-{name}" for name in quiet]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,1900", *options, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=patient(100), check=True)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on PATH, which is not installed")
def test_in_a_browser(runs: dict[str, Path], tmp_path: Path) -> None:
    """Every figure has a size, the page fits its window, nothing is fetched, and the console is silent."""
    file = tmp_path / "report.html"
    assert main([*map(str, runs.values()), "--out", str(file)]) == 0
    shown = chromium(tmp_path, file, f"--screenshot={tmp_path / 'report.png'}")
    assert "CONSOLE" not in shown.stderr
    assert (tmp_path / "report.png").stat().st_size > 50_000

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
