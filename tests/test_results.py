"""docs/results.md and the README's numbers agree with each other and with the code that they name."""

import re
from importlib import import_module
from typing import Any

import pytest
import torch
from documented import DOCS, table

from benchmarks.payload_bytes import payload, resnet50
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc_datasets import Digits
from dgc_models import DigitsCNN
from dgc_training.data import count_samples, steps_per_epoch

RESULTS = (DOCS / "results.md").read_text()
README = (DOCS.parent / "README.md").read_text()


def test_the_readme_s_numbers_are_those_of_the_results() -> None:
    section = README.split("## Numbers\n")[1].split("\n## ")[0].replace("\n", " ")
    prose = re.sub(r"\]\([^)]*\)|ResNet-50", "", section)
    numbers = set(re.findall(r"\d[\d,.]*\d", prose))
    assert len(numbers) > 10 and {number for number in numbers if number not in RESULTS} == set()
    assert "| method | accuracy" not in README and "std. error" not in README


POINTS = r"(-?[\d.]+) points \(([\d.]+)\), ([\d.]+) times fewer"
CHANGE, TWO = r"([-+][\d.]+ %) bits per character \(([\d.]+)\)", r"(-?[\d.]+) \(([\d.]+)\)"
BITS = "method | bits per character | to dense | +-"
# table, page, least number of quotations, quoted columns after the name, and the form of the quotation
QUOTED = [
    ("method | accuracy % |", "results.md", 21, (1, 2, 3), rf"\(`([\w-]+)`\): {POINTS} bytes"),
    ("method, second run", "results.md", 4, (1, 2, 3), rf"\(`([\w-]+)`, second run\): {POINTS} wire bytes"),
    ("method, 10 epochs", "results.md", 3, (1, 2, 3), rf"\(`([\w-]+)`, 10 epochs\): {POINTS} wire bytes"),
    (BITS, "local.md", 5, (1, 2, -1), r"\(`([\w-]+)`[^)]*\): (\+[\d.]+ %) \(([\d.]+)\), (\d+) times"),
    (f"{BITS} | dense / wire", "language.md", 3, (1, 2, 3), rf"\(`([\w-]+)`\): {CHANGE}, ([\d.]+) times"),
    ("method | 4 ranks, %", "results.md", 4, (1, 2, 4, 5), rf"\(`(\w+)`[^)]*\): {TWO} and {TWO}"),
]


def test_the_sections_of_methods_quote_the_tables() -> None:
    text = " ".join((DOCS / "methods.md").read_text().split())
    for header, page, count, columns, pattern in QUOTED:
        rows = {name.split("`")[1]: cells for name, *cells in table(header, page) if "`" in name}
        quoted = re.findall(pattern, text)
        for name, *numbers in quoted:
            assert [rows[name][column] for column in columns] == numbers, (header, name)
        assert len(quoted) >= count, header
        if "," in header.split(" |")[0]:  # these are quoted whole, but for the row without compression
            assert len({name for name, *_ in quoted}) == len(rows) - 1 == count, header
    points = re.findall(QUOTED[0][-1], text)
    assert len(points) == text.count(" times fewer bytes") - 2, "quotations of another form"


def test_captions_say_how_many_steps_an_epoch_really_has() -> None:
    samples = {count_samples(Digits(fold)["train"]) for fold in (0, 1)}
    text = RESULTS.replace("\n", " ")
    settings = re.findall(r"(\d+) ranks, batches of (\d+) per rank, (\d+) epochs of (\d+) steps", text)
    assert len(settings) >= 5
    for size, batch, _, steps in settings:
        assert {steps_per_epoch(n, int(size), int(batch), 1) for n in samples} == {int(steps)}, (size, batch)
    assert "1530 steps" in RESULTS and "34 epochs of 45 steps" in RESULTS and 34 * 45 == 1530


NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")
PAGES = [*(DOCS.parent / name for name in NAMES), *DOCS.glob("*.md")]


def commands(text: str) -> list[list[str]]:
    """The words of all commands with benchmarks, inline or in lines of their own."""
    joined = re.sub(r"```\w*\n", "", text).replace("\\\n", " ")
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]*)`", joined)]
    lines = [line.strip() for line in joined.splitlines() if line[:4] == "    " or line.startswith("python")]
    found = [part for code in (*inline, *lines) for part in re.split(r"[;>#]", code)]
    return [part.split("-m benchmarks.")[1].split() for part in found if "-m benchmarks." in part]


def test_benchmarks_accept_the_commands_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every benchmark of the list is on a page."""

    class Accepted(Exception):
        pass

    def parse(self: Any, args: Any = None, namespace: Any = None) -> Any:
        found, rest = self.parse_known_args(args)
        assert not rest, rest
        raise Accepted

    monkeypatch.setattr("argparse.ArgumentParser.parse_args", parse)
    found = [words for page in PAGES for words in commands(page.read_text())]
    listed = {file.stem for file in (DOCS.parent / "benchmarks").glob("*.py") if "\nTAKES = " in file.read_text()}
    assert {name for name, *_ in found} == listed and len(found) > 50
    for name, *words in found:
        words = ["dense" if word == "NAME" else word for word in words]
        monkeypatch.setattr("sys.argv", [name, *words])
        with pytest.raises(Accepted):
            import_module(f"benchmarks.{name}").main()


def test_payloads_of_resnet50_are_what_the_benchmark_measures() -> None:
    rows = {name: cells for name, *cells in table("values, indices |", "results.md")}
    parameters = resnet50()
    for name in ("`int8`, `rice`", "`sign`, `rice`"):
        values, indices = name.replace("`", "").split(", ")
        for cell, vectors in zip(rows[name], ("fp32", "bf16", "int8", "sparse"), strict=True):
            with torch.no_grad():
                found = payload(parameters, values, indices, vectors)
            assert cell == f"{found:,}", (name, vectors)


def test_the_example_of_bytes_is_what_a_step_sends() -> None:
    def body(transport: Any) -> Any:
        model = DigitsCNN()
        compression = DGCCompressor(0.001, DGCSGDMemory(momentum=0.9), fp16_values=True, int32_indices=True)
        inner = DGCSGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), compression, transport=transport)
        model(torch.ones(2, 1, 8, 8)).sum().backward()
        optimizer.step()
        return optimizer.meter

    meter = LockstepWorld(4).run(body)[0]
    payload, wire, dense = meter.payload_bytes, meter.wire_bytes, meter.dense_wire_bytes
    rows = {name: cells for name, *cells in table("| payload | wire |", "bytes.md")}
    assert rows["DGC together"] == [f"{payload:,}", f"{wire:,.0f}"]
    assert rows["dense / DGC"] == [f"{dense / 1.5 / payload:.0f}", f"{dense / wire:.0f}"]
    assert f"{wire:,.0f} against {dense:,.0f}" in RESULTS and f"payload {payload:,} against" in RESULTS
