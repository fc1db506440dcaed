"""Links, navigation, pictures and API pages, CITATION.cff and CI agree with the files and names that exist."""

import ast
import os
import re
from collections import Counter
from collections.abc import Iterator
from html import unescape
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from documented import DOCS

import dgc
from scripts.docs import links, pictures
from scripts.docs.links import ALWAYS, on_page_content, place, prose, reached, rewritten, search_of
from scripts.docs.pictures import PICTURES, Axis, main, number, rows

ROOT = DOCS.parent
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/*.md")]
API = "".join(page.read_text() for page in sorted(DOCS.glob("api/*.md")))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)]+))?\)")


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
        text = rewritten((ROOT / name).read_text(), name)
        for target, _ in LINK.findall("".join(prose(text)[::2])):
            where = PurePosixPath((Path("/") / place(name).parent / target).resolve().relative_to("/"))
            assert not target or where in there, (name, target)
    # the first page leads to every other one, and a picture to its file
    targets = {target for target, _ in LINK.findall((DOCS / "index.md").read_text())}
    assert {page.name for page in DOCS.glob("*.md")} - targets == {"index.md"}
    image = '<img alt="a" src="../layers.svg" />'
    assert on_page_content(f"<p>{image}</p>", None, None, None) == f'<p><a href="../layers.svg">{image}</a></p>'


def test_the_search_prefers_pages_that_describe() -> None:
    there = [*(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")), links.CHANGES]
    found = {uri: search_of(uri) for uri in there}
    assert found[links.CHANGES] == {"exclude": True} and found["index.md"] == {}
    assert found["api/wire.md"]["boost"] < 1 < found["methods.md"]["boost"]
    assert all(any(uri.startswith(start) for uri in there) for start in links.BOOSTS)


def pages_of(tree: Any) -> list[str]:
    if isinstance(tree, str):
        return [tree]
    return [page for part in (tree if isinstance(tree, list) else tree.values()) for page in pages_of(part)]


def test_the_navigation_has_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    found = Counter(pages_of(yaml.safe_load(text)["nav"]))
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    generated = {str(place(path)) for path in reached()}
    assert set(found.values()) == {1} and set(found) - generated == there


def public_names(module: str) -> set[str]:
    """The names that a package's __init__ collects for its users."""
    tree = ast.parse((ROOT / module.replace(".", "/") / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {f"{module}.{name.name}" for node in imports for name in node.names if name.asname == name.name}


def test_the_api_has_every_public_name_once() -> None:
    for package in "optim fsdp compression selection wire gossip local comm".split():
        names = [name for name in re.findall(r"^::: (\S+)", API, re.M) if name.startswith(f"dgc.{package}.")]
        direct = [name for name in names if name.count(".") == 2]
        assert sorted(direct) == sorted(public_names(f"dgc.{package}"))


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


def test_the_pictures_of_a_gradient_and_of_the_layers() -> None:
    """The first names files that exist, the second has every package above what it imports."""
    files = re.findall(r"dgc/[\w/.]+", (DOCS / "gradient.svg").read_text())
    assert len(files) > 10 and [name for name in files if not (ROOT / name).exists()] == []
    texts = re.findall(r'<text class="name" x="\d+" y="(\d+)">(.*?)</text>', (DOCS / "layers.svg").read_text())
    height = {name: int(y) for y, names in texts for name in names.split(", ")}
    modules = sorted({*(ROOT / "dgc").rglob("*.py")} - {ROOT / "dgc/__init__.py"})
    assert {name for name in height if name.startswith("dgc.")} == {package_of(path) for path in modules}
    edges = {edge for path in modules for edge in imports(path)}
    assert len(edges) > 50 and [edge for edge in edges if height[edge[0]] >= height[edge[1]]] == []


PYPROJECT = (ROOT / "pyproject.toml").read_text()
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
# of the schema, version 1.2.0: what is used here
KEYS = set("authors cff-version message title abstract type version license keywords references".split())
REFERENCE = {"type", "title", "authors", "year", "status", "url", "doi"}
REFERENCE |= {"conference", "journal", "institution", "volume", "issue", "start", "end"}
TYPES = {"article", "conference-paper", "report", "software"}


def test_the_citation_has_the_form_of_cff() -> None:
    assert set(CITATION) == KEYS and CITATION["cff-version"] == "1.2.0" and CITATION["type"] == "software"
    assert CITATION["version"] == dgc.__version__ and f'license = "{CITATION["license"]}"' in PYPROJECT
    for reference in CITATION["references"]:
        assert {"type", "title", "authors"} <= set(reference) <= REFERENCE, reference
        assert reference["type"] in TYPES and reference["authors"] and reference["title"]
        for author in reference["authors"]:
            assert set(author) in ({"family-names", "given-names"}, {"name"}), author
            assert all(isinstance(value, str) for value in author.values())
        assert all(isinstance(reference.get(key, 0), int) for key in ("year", "volume", "issue", "start", "end"))
        assert all(set(reference.get(key, {"name": ""})) == {"name"} for key in ("conference", "institution"))
    titles = [reference["title"] for reference in CITATION["references"]]
    assert len(titles) == len(set(titles)) > 30
    # it has the papers of the code: those that dgc/ names by arXiv number or DOI, and in docs/methods.md
    text = "".join(path.read_text() for path in [*ROOT.glob("dgc/**/*.py"), ROOT / "docs/methods.md"])
    named = set(re.findall(r"arXiv\s+(\d{4}\.\d{5})", text)) | set(re.findall(r"doi\s+(10\.[\w./-]*\w)", text))
    cited = {reference.get("doi") or reference.get("url", "") for reference in CITATION["references"]}
    cited = {link.removeprefix("https://arxiv.org/abs/") for link in cited}
    assert len(named) > 25 and named - cited == set()
    assert {link for link in cited if re.fullmatch(r"\d{4}\.\d{5}", link)} - named == set()


def test_continuous_integration_runs_commands_that_exist() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == ".ci/run" and os.access(ROOT / ".ci/run", os.X_OK)
    text = (ROOT / ".ci/run").read_text() + "\n".join(commands) + (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    pairs = re.findall(r"`make (\w+)`|^ *make(?: --\S+)* (\w+)", text, re.M)
    used = {first or second for first, second in pairs}
    assert {"setup", "lint", "types", "test", "proof"} <= used <= targets, used - targets
    packages = commands[0].split("install -y ")[1].split()
    assert set(packages) - {"make"} <= set(re.findall(r"[\w+]+(?:-\w+)*", (ROOT / "scripts/setup.sh").read_text()))


def test_no_file_has_marks_of_an_unfinished_merge() -> None:
    folders = ("dgc*", "docs", "configs", "benchmarks", "scripts", "examples", "tests")
    files = [*ROOT.glob("*.md"), *(file for folder in folders for file in ROOT.glob(f"{folder}/**/*.*"))]
    kinds = {".py", ".md", ".h", ".cpp", ".html", ".sh"}
    texts = {file: file.read_text() for file in files if file.suffix in kinds and file.is_file()}
    assert len(texts) > 400
    assert [str(file) for file, text in texts.items() if re.search(r"^(<{7}|>{7}) ", text, re.M)] == []


# Widths of characters in Helvetica, as shares of the size of the font; 0.556 is that of digits and most letters.
WIDTHS = dict.fromkeys("ijl.,:;/tfr -()'|", 0.29) | dict.fromkeys("mMwW%", 0.86)
WIDTHS |= dict.fromkeys("ABCDEGKPRSTUX", 0.69)
SIZES = {kind: int(size) for kind, size in re.findall(r"\.(\w+) \{ font-size: (\d+)px", pictures.STYLE)}

Box = tuple[float, float, float, float]


def texts(svg: str) -> Iterator[tuple[str, Box]]:
    """Each text with its box: left, top, right, bottom."""
    for kind, x, y, anchor, text in re.findall(
        r'<text class="(\w+)[^"]*" x="([\d.]+)" y="([\d.]+)"(?: text-anchor="(\w+)")?>(.*?)</text>', svg
    ):
        width = SIZES[kind] * sum(WIDTHS.get(character, 0.556) for character in unescape(text))
        left = float(x) - {"": 0.0, "middle": width / 2, "end": width}[anchor]
        yield unescape(text), (left, float(y) - 0.72 * SIZES[kind], left + width, float(y) + 0.1 * SIZES[kind])


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_drawn_from_its_table(name: str) -> None:
    """And no text of it is on another or cut off."""
    svg = PICTURES[name]().svg()
    assert (DOCS / f"{name}.svg").read_text() == svg, "python -m scripts.docs.pictures"
    assert any(f"{name}.svg)" in page.read_text() for page in (DOCS.parent / "README.md", *DOCS.glob("*.md")))
    found = list(texts(svg))
    assert len(found) == svg.count("<text ") > 8
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', svg)[0])
    for above, (text, box) in enumerate(found):
        assert box[0] >= 0 and box[2] <= width and box[3] <= height, text
        assert [other for other, its in found[above + 1 :] if overlap(box, its)] == [], text


def test_every_picture_has_colours_for_a_dark_background() -> None:
    for file in DOCS.glob("*.svg"):
        light, dark = file.read_text().split("@media (prefers-color-scheme: dark)")
        assert ".page" in light and ".page" in dark, file


def test_a_changed_number_changes_the_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in DOCS.glob("*.md"):
        (tmp_path / page.name).write_text(page.read_text().replace("| 91.0 |", "| 95.0 |"))
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    assert main(["accuracy"]) == 0
    assert "Up to 95 times fewer bytes" in (tmp_path / "accuracy.svg").read_text()
    capsys.readouterr()
    assert main(["accuracy", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("no picture nothing; there are accuracy, ")


def test_cells_and_axes_are_read_as_numbers() -> None:
    assert [number(cell) for cell in ("1,273", "+5.0 %", "-0.06", "")] == [1273.0, 5.0, -0.06, 0.0]
    assert rows("results.md", "method | accuracy % | minus dense")["dense"][0] == "99.28"
    axis = Axis("", 1.0, 100.0, [], logarithmic=True)
    assert [axis.share(value) for value in (1.0, 10.0, 100.0)] == [0.0, 0.5, 1.0]
    assert Axis("", 2.0, 4.0, []).share(3.0) == 0.5
