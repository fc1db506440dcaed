"""Links, pictures, API pages, numbers, commands and examples of the documentation fit the files and the code."""

import ast
import doctest
import os
import re
from collections import Counter
from collections.abc import Iterator
from html import unescape
from importlib import import_module
from pathlib import Path, PurePosixPath
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from channels import ChannelWorld
from documented import DOCS, code, table
from optim.nets import dgc as dgc_compressor
from optim.nets import dgc_sgd, wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgc
from benchmarks.payload_bytes import payload, resnet50
from dgc.comm.collectives import all_reduce
from dgc.comm.connect import choose_transport
from dgc.comm.lockstep import LockstepWorld
from dgc.ddp import compress
from dgc.gossip.model import FlatModel
from dgc.gossip.topology import peer_schedule
from dgc.testing import check_compressor
from dgc_datasets import Digits
from dgc_models import DigitsCNN
from dgc_training.data import count_samples, steps_per_epoch
from tools.docs import pictures
from tools.docs.links import ALWAYS, place, prose, reached, rewritten
from tools.docs.pictures import PICTURES

ROOT = DOCS.parent
Patch = pytest.MonkeyPatch
Printed = pytest.CaptureFixture[str]
RESULTS, README = (DOCS / "results.md").read_text(), (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/*.md")]
API = "".join(page.read_text() for page in sorted(DOCS.glob("api/*.md")))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)]+))?\)")
POINTS = r"(-?[\d.]+) points \(([\d.]+)\), ([\d.]+) times fewer"
CHANGE, TWO = r"([-+][\d.]+ %) bits per character \(([\d.]+)\)", r"(-?[\d.]+) \(([\d.]+)\)"
BITS = "method | bits per character | to dense | +-"
# table, page, quoted columns after the name, and the form of the quotation
QUOTED = [
    ("method | accuracy % |", "results.md", (1, 2, 3), rf"\(`([\w-]+)`\): {POINTS} bytes"),
    ("method, second run", "results.md", (1, 2, 3), rf"\(`([\w-]+)`, second run\): {POINTS} wire bytes"),
    ("method, 10 epochs", "results.md", (1, 2, 3), rf"\(`([\w-]+)`, 10 epochs\): {POINTS} wire bytes"),
    (BITS, "local.md", (1, 2, -1), r"\(`([\w-]+)`[^)]*\): (\+[\d.]+ %) \(([\d.]+)\), (\d+) times"),
    (f"{BITS} | dense / wire", "language.md", (1, 2, 3), rf"\(`([\w-]+)`\): {CHANGE}, ([\d.]+) times"),
    ("method | 4 ranks, %", "results.md", (1, 2, 4, 5), rf"\(`(\w+)`[^)]*\): {TWO} and {TWO}"),
]


def anchors(page: Path) -> set[str]:
    """What a link to a place of the page may name: its headings, and the names of an API page."""
    headings = [line.lstrip("#") for line in page.read_text().splitlines() if line[:1] == "#"]
    names = re.findall(r"^::: (\S+)", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in headings} | set(names)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, place_of_it in LINK.findall("".join(prose(page.read_text())[::2])):
            path = (page.parent / target).resolve() if target else page
            assert path.exists(), (page, target)
            assert not place_of_it or place_of_it in anchors(path), f"{page}: {target}#{place_of_it}"
    # and every link of the site to one of its pages
    there = {PurePosixPath(path.relative_to(DOCS)) for path in DOCS.rglob("*.*")} | set(map(place, reached()))
    for name in (*(PurePosixPath(path.relative_to(ROOT)) for path in DOCS.rglob("*.md")), *ALWAYS):
        for target, _ in LINK.findall("".join(prose(rewritten((ROOT / name).read_text(), name))[::2])):
            where = PurePosixPath((Path("/") / place(name).parent / target).resolve().relative_to("/"))
            assert not target or where in there, (name, target)
    # the first page leads to every other one
    targets = {target for target, _ in LINK.findall((DOCS / "index.md").read_text())}
    assert {page.name for page in DOCS.glob("*.md")} - targets == {"index.md"}


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    navigation = yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"], width=999)
    names = Counter(re.findall(r"[-:] (\S+\.md)$", navigation, re.M))
    assert set(names.values()) == {1} and set(names) - {str(place(path)) for path in reached()} == pages


CATALOGUES = "optim fsdp contrib sparse.selectors sparse.payloads gossip local comm compression.py memory.py"


@pytest.mark.parametrize("package", CATALOGUES.split())
def test_the_pages_of_the_interface_have_every_public_name_once(package: str) -> None:
    """The public names are those that a package collects for its users."""
    place = ROOT / "dgc" / (package if package.endswith(".py") else package.replace(".", "/") + "/__init__.py")
    imports = [node for node in ast.walk(ast.parse(place.read_text())) if isinstance(node, ast.ImportFrom)]
    aliases = {name.name for node in imports for name in node.names if name.asname == name.name}
    public = getattr(import_module(f"dgc.{package.removesuffix('.py')}"), "__all__", aliases)
    page = re.escape(package.removesuffix(".py"))
    assert sorted(re.findall(rf"^::: dgc\.{page}\.(\w+)$", API, re.M)) == sorted(public)


def package_of(path: Path) -> str:
    return "dgc." + path.relative_to(ROOT / "dgc").parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(package, other package of dgc that a file of it imports)."""
    own = package_of(path)
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        packages = {".".join(name.split(".")[:2]) for name in names if name.startswith("dgc.")}
        yield from ((own, package) for package in packages - {own})


def test_a_row_of_results_stands_in_one_place() -> None:
    """A row of a table with measurements: three numbers or more, or a command."""
    pages: dict[str, list[str]] = {}
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        for line in page.read_text().splitlines():
            numbers = re.findall(r"\|[^|]*\d[^|]*(?=\|)", line) if line.startswith("| ") else []
            if len(numbers) >= 3 or "python -m benchmarks" in line:
                pages.setdefault(line, []).append(page.name)
    assert len(pages) > 200 and {line: names for line, names in pages.items() if len(names) > 1} == {}
    assert "| method | accuracy" not in README and "std. error" not in README


def test_the_numbers_of_the_readme_are_in_the_results() -> None:
    section = README.split("## Numbers\n")[1].split("\n## ")[0].replace("\n", " ")
    said = set(re.findall(r"\d[\d,.]*\d", re.sub(r"\]\([^)]*\)|ResNet-50", "", section)))
    assert len(said) > 10 and {number for number in said if number not in RESULTS} == set()


def test_the_picture_of_a_gradient_names_files_that_exist() -> None:
    files = re.findall(r"dgc/[\w/.]+", (DOCS / "gradient.svg").read_text())
    assert len(files) > 10 and [name for name in files if not (ROOT / name).exists()] == []


def test_the_picture_of_the_layers_has_every_package_above_what_it_imports() -> None:
    texts = re.findall(r'<text class="name" x="\d+" y="(\d+)">(.*?)</text>', (DOCS / "layers.svg").read_text())
    height = {name: int(y) for y, names in texts for name in names.split(", ")}
    modules = sorted({*(ROOT / "dgc").rglob("*.py")} - {ROOT / "dgc/__init__.py"})
    assert {name for name in height if name.startswith("dgc.")} == {package_of(path) for path in modules}
    edges = {edge for path in modules for edge in imports(path)}
    assert len(edges) > 50 and [edge for edge in edges if height[edge[0]] >= height[edge[1]]] == []


@pytest.mark.parametrize("file", sorted(DOCS.glob("*.svg")), ids=lambda file: file.stem)
def test_a_picture_has_colours_for_a_dark_background(file: Path) -> None:
    light, dark = file.read_text().split("@media (prefers-color-scheme: dark)")
    assert ".page" in light and ".page" in dark


def test_the_citation_has_the_form_of_cff() -> None:
    """Of the schema, version 1.2.0: what is used here."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    keys = set("authors cff-version message title abstract type version license keywords references".split())
    may = "type title authors year status url doi conference journal institution volume issue start end".split()
    assert set(citation) == keys and citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["version"] == dgc.__version__
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= set(reference) <= set(may), reference
        assert reference["type"] in ("article", "conference-paper", "report", "software")
        assert reference["authors"] and reference["title"]
        for author in reference["authors"]:
            assert set(author) in ({"family-names", "given-names"}, {"name"}), author
            assert all(isinstance(value, str) for value in author.values())
        assert all(isinstance(reference.get(key, 0), int) for key in ("year", "volume", "issue", "start", "end"))
        assert all(set(reference.get(key, {"name": ""})) == {"name"} for key in ("conference", "institution"))
    titles = [reference["title"] for reference in citation["references"]]
    assert len(titles) == len(set(titles)) > 30
    # it has the papers of the code: those that dgc/ names by arXiv number or DOI, and in docs/methods.md
    text = "".join(path.read_text() for path in [*ROOT.glob("dgc/**/*.py"), ROOT / "docs/methods.md"])
    named = set(re.findall(r"arXiv\s+(\d{4}\.\d{5})", text)) | set(re.findall(r"doi\s+(10\.[\w./-]*\w)", text))
    cited = {reference.get("doi") or reference.get("url", "") for reference in citation["references"]}
    cited = {link.removeprefix("https://arxiv.org/abs/") for link in cited}
    assert len(named) > 25 and named - cited == set()
    assert {link for link in cited if re.fullmatch(r"\d{4}\.\d{5}", link)} - named == set()


def test_continuous_integration_runs_commands_that_exist() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == ".ci/run" and os.access(ROOT / ".ci/run", os.X_OK)
    text = (ROOT / ".ci/run").read_text() + "\n".join(commands) + (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    used = {first or second for first, second in re.findall(r"`make (\w+)`|^ *make(?: --\S+)* (\w+)", text, re.M)}
    assert {"setup", "lint", "types", "test", "proof"} <= used <= targets, used - targets
    packages = commands[0].split("install -y ")[1].split()
    assert set(packages) - {"make"} <= set(re.findall(r"[\w+]+(?:-\w+)*", (ROOT / "scripts/setup.sh").read_text()))


def test_no_file_has_marks_of_an_unfinished_merge() -> None:
    kinds = {".py", ".md", ".h", ".cpp", ".html", ".sh"}
    files = [file for file in (*ROOT.glob("*.*"), *ROOT.glob("[!.]*/**/*.*")) if file.suffix in kinds]
    assert len(files) > 400
    assert [file for file in files if re.search(r"^(<{7}|>{7}) ", file.read_text(), re.M)] == []


# Widths of characters in Helvetica, as shares of the font's size; 0.556 is the width of digits and most letters.


WIDTHS = dict.fromkeys("ijl.,:;/tfr -()'|", 0.29) | dict.fromkeys("mMwW%", 0.86)
WIDTHS |= dict.fromkeys("ABCDEGKPRSTUX", 0.69)
SIZES = {kind: int(size) for kind, size in re.findall(r"\.(\w+) \{ font-size: (\d+)px", pictures.STYLE)}

Box = tuple[float, float, float, float]


def texts(svg: str) -> Iterator[tuple[str, Box]]:
    """Each text with its box: left, top, right, bottom."""
    form = r'<text class="(\w+)[^"]*" x="([\d.]+)" y="([\d.]+)"(?: text-anchor="(\w+)")?>(.*?)</text>'
    for kind, x, y, anchor, text in re.findall(form, svg):
        width = SIZES[kind] * sum(WIDTHS.get(character, 0.556) for character in unescape(text))
        left = float(x) - {"": 0.0, "middle": width / 2, "end": width}[anchor]
        yield unescape(text), (left, float(y) - 0.72 * SIZES[kind], left + width, float(y) + 0.1 * SIZES[kind])


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_drawn_from_its_table(name: str) -> None:
    """And no text of it is on another or on a point, or cut off."""
    svg = PICTURES[name]().svg()
    assert (DOCS / f"{name}.svg").read_text() == svg, "python -m tools.docs.pictures"
    assert any(f"{name}.svg)" in page.read_text() for page in (DOCS.parent / "README.md", *DOCS.glob("*.md")))
    found = list(texts(svg))
    assert len(found) == svg.count("<text ") > 8
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', svg)[0])
    points = [(float(x), float(y)) for x, y in re.findall(r'<circle [^>]*cx="([\d.]+)" cy="([\d.]+)"', svg)]
    for above, (text, (left, top, right, bottom)) in enumerate(found):
        touched = [(x, y) for x, y in points if left - 3 < x < right + 3 and top - 3 < y < bottom + 3]
        assert touched == [], text
        assert left >= 0 and right <= width and bottom <= height, text
        rest = found[above + 1 :]
        on_it = [other for other, (a, b, c, d) in rest if left < c and a < right and top < d and b < bottom]
        assert on_it == [], text


def test_the_sections_of_methods_quote_the_tables() -> None:
    text = " ".join((DOCS / "methods.md").read_text().split())
    for header, page, columns, pattern in QUOTED:
        rows = {name.split("`")[1]: cells for name, *cells in table(header, page) if "`" in name}
        quoted = re.findall(pattern, text)
        for name, *numbers in quoted:
            assert [rows[name][column] for column in columns] == numbers, (header, name)
        assert quoted, header


def test_captions_say_how_many_steps_an_epoch_has() -> None:
    samples, text = {count_samples(Digits(fold)["train"]) for fold in (0, 1)}, RESULTS.replace("\n", " ")
    settings = re.findall(r"(\d+) ranks, batches of (\d+) per rank, (\d+) epochs of (\d+) steps", text)
    assert len(settings) >= 5
    for size, batch, _, steps in settings:
        assert {steps_per_epoch(n, int(size), int(batch), 1) for n in samples} == {int(steps)}, (size, batch)
    assert "1530 steps" in RESULTS and "34 epochs of 45 steps" in RESULTS and 34 * 45 == 1530


def commands(text: str) -> list[list[str]]:
    """The words of all commands with benchmarks, inline or in lines of their own."""
    joined = re.sub(r"```\w*\n", "", text).replace("\\\n", " ")
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]*)`", joined)]
    lines = [line.strip() for line in joined.splitlines() if line[:4] == "    " or line.startswith("python")]
    found = [part for code in (*inline, *lines) for part in re.split(r"[;>#]", code)]
    return [part.split("-m benchmarks.")[1].split() for part in found if "-m benchmarks." in part]


def test_benchmarks_accept_the_commands_of_the_pages(monkeypatch: Patch) -> None:
    """And every benchmark of the list is on a page."""

    def parse(self: Any, args: Any = None, namespace: Any = None) -> Any:
        found, rest = self.parse_known_args(args)
        assert not rest, rest
        raise InterruptedError  # accepted

    monkeypatch.setattr("argparse.ArgumentParser.parse_args", parse)
    found = [words for page in (*PAGES, ROOT / "Makefile") for words in commands(page.read_text())]
    listed = {file.stem for file in (ROOT / "benchmarks").glob("*.py") if "\nTAKES = " in file.read_text()}
    assert {name for name, *_ in found} == listed and len(found) > 50
    for name, *words in found:
        words = ["dense" if word == "NAME" else word for word in words]
        monkeypatch.setattr("sys.argv", [name, *words])
        with pytest.raises(InterruptedError):
            import_module(f"benchmarks.{name}").main()


def test_the_page_has_the_payloads_that_the_benchmark_measures() -> None:
    rows, parameters = {name: cells for name, *cells in table("values, indices |", "results.md")}, resnet50()
    for name in ("`int8`, `rice`", "`sign`, `rice`"):
        values, indices = name.replace("`", "").split(", ")
        for cell, vectors in zip(rows[name], ("fp32", "bf16", "int8", "sparse"), strict=True):
            with torch.no_grad():
                found = payload(parameters, values, indices, vectors)
            assert cell == f"{found:,}", (name, vectors)


def test_the_page_has_the_payloads_that_a_step_sends() -> None:
    def body(transport: Any) -> Any:
        model, compression = DigitsCNN(), dgc_compressor(0.001, fp16_values=True, int32_indices=True)
        optimizer = wrap(model, transport, dgc_sgd, compression=compression)
        model(torch.ones(2, 1, 8, 8)).sum().backward()
        optimizer.step()
        return optimizer.meter

    meter = LockstepWorld(4).run(body)[0]
    sent, wire, dense = meter.payload_bytes, meter.wire_bytes, meter.dense_wire_bytes
    rows = {name: cells for name, *cells in table("| payload | wire |", "bytes.md")}
    assert rows["DGC together"] == [f"{sent:,}", f"{wire:,.0f}"]
    assert rows["dense / DGC"] == [f"{dense / 1.5 / sent:.0f}", f"{dense / wire:.0f}"]
    assert f"{wire:,.0f} against {dense:,.0f}" in RESULTS and f"payload {sent:,} against" in RESULTS


def examples() -> dict[str, tuple[str, str]]:
    """(code, file) of each docstring's example, by the name of its class or function, and of the page's blocks."""
    found = {f"methods.md {number}": (block, "methods.md") for number, block in enumerate(code("methods.md"))}
    assert len(found) > 20
    # the examples of dgc.integrations need the trainers of others: examples/ and tests/integrations run them
    for file in sorted({*(ROOT / "dgc").rglob("*.py")} - {*ROOT.glob("dgc/integrations/*.py")}):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            text = ast.get_docstring(node) or ""
            if "\nExample:\n" in text:
                block = text.split("\nExample:\n")[1].split("\n\n")[0]
                found[f"{file.relative_to(ROOT)} {node.name}"] = (dedent(block), str(file))
    return found


def one_rank() -> Any:
    transport: Any = LockstepWorld(1).transports[0]
    transport.channel = lambda: ChannelWorld(1).channels[0]
    return transport


def names() -> dict[str, Any]:
    """What an example may use: public names, and the objects of a training script."""
    packages = "comm compression contrib gossip launch local memory optim sparse.selectors sparse.payloads".split()
    public = {n: v for name in packages for n, v in vars(import_module(f"dgc.{name}")).items() if n[0] != "_"}
    others = DistributedDataParallel, FlatModel, LockstepWorld, all_reduce, choose_transport, peer_schedule
    public |= {of.__name__: of for of in (*others, check_compressor)} | {"compress": compress}
    model = nn.Linear(32, 16)
    public |= {"torch": torch, "dgc": dgc, "model": model, "x": torch.ones(3)}
    public |= {"inputs": torch.ones(4, 32), "targets": torch.zeros(4, dtype=torch.int64)}
    public |= {"transport": one_rank(), "connect": lambda **options: one_rank()}
    public |= {"loss_fn": lambda outputs, *targets: outputs.square().mean()}
    return public | {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


@pytest.mark.filterwarnings("ignore")  # one rank has nobody to exchange with
def test_examples_run(monkeypatch: Patch, request: pytest.FixtureRequest) -> None:
    for module in ("distributed", "local"):
        monkeypatch.setattr(f"dgc.optim.{module}.default_transport", lambda **options: one_rank())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    found = examples()
    assert len(found) > 80
    failed: list[str] = []
    for name, (text, file) in found.items():
        namespace = names()
        if ">>>" in text:
            test = doctest.DocTestParser().get_doctest(text, namespace, name, file, 0)
            doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=failed.append)
            continue
        try:
            exec(text, namespace)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}\n{text}")
    assert not failed, "\n".join(failed)


def test_the_first_example_of_the_package_runs_as_it_stands(request: pytest.FixtureRequest) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    assert dgc.__doc__ is not None
    block = "\n".join(line for line in dgc.__doc__.splitlines() if line.startswith("    "))
    found: dict[str, Any] = {"net": nn.Linear(4, 4)}
    exec(dedent(block), found)
    assert isinstance(found["model"], DistributedDataParallel) and found["model"]._comm_hooks
