"""Links, navigation and API pages, CITATION.cff and CI agree with the files and names that exist."""

import ast
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from documented import DOCS

import dgc
from scripts.docs.links import (
    ALWAYS,
    BOOSTS,
    CHANGES,
    on_page_content,
    place,
    prose,
    reached,
    rewritten,
    search_of,
)

ROOT = DOCS.parent
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/*.md")]
API = "".join(page.read_text() for page in sorted(DOCS.glob("api/*.md")))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)]+))?\)")


def anchors(page: Path) -> set[str]:
    """What a link to a place of the page may name: its headings, and the names of an API page."""
    headings = [line.lstrip("#") for line in page.read_text().splitlines() if line[:1] == "#"]
    names = re.findall(r"^::: (\S+)", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in headings} | set(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, place_of_it in LINK.findall("".join(prose(page.read_text())[::2])):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not place_of_it or place_of_it in anchors(path), f"{target}#{place_of_it}"


def test_every_link_of_the_site_leads_to_one_of_its_pages() -> None:
    there = {place(path) for path in reached()} | {
        PurePosixPath(path.relative_to(DOCS)) for path in DOCS.rglob("*.*")
    }
    for page in (*(PurePosixPath(path.relative_to(ROOT)) for path in DOCS.rglob("*.md")), *ALWAYS):
        text = rewritten((ROOT / page).read_text(), page)
        for target, _ in LINK.findall("".join(prose(text)[::2])):
            path = PurePosixPath((Path("/") / place(page).parent / target).resolve().relative_to("/"))
            assert not target or path in there, (page, target)


def test_a_picture_links_to_its_file() -> None:
    image = '<img alt="a" src="../layers.svg" />'
    assert on_page_content(f"<p>{image}</p>", None, None, None) == f'<p><a href="../layers.svg">{image}</a></p>'


def test_the_search_prefers_pages_that_describe() -> None:
    there = [*(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")), CHANGES]
    found = {uri: search_of(uri) for uri in there}
    assert found[CHANGES] == {"exclude": True} and found["index.md"] == {}
    assert found["api/wire.md"]["boost"] < 1 < found["methods.md"]["boost"]
    assert all(any(uri.startswith(start) for uri in there) for start in BOOSTS)


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


def test_the_first_page_leads_to_every_other_one() -> None:
    targets = {target for target, _ in LINK.findall((DOCS / "index.md").read_text())}
    assert {page.name for page in DOCS.glob("*.md")} - targets == {"index.md"}


def public_names(module: str) -> set[str]:
    """The names that a package's __init__ collects for its users."""
    tree = ast.parse((ROOT / module.replace(".", "/") / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {f"{module}.{name.name}" for node in imports for name in node.names if name.asname == name.name}


@pytest.mark.parametrize("package", "optim fsdp compression selection wire gossip local comm".split())
def test_the_api_has_every_public_name_once(package: str) -> None:
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


def test_the_picture_of_a_gradient_names_files_that_exist() -> None:
    names = re.findall(r"dgc/[\w/.]+", (DOCS / "gradient.svg").read_text())
    assert len(names) > 10 and [name for name in names if not (ROOT / name).exists()] == []


def test_the_picture_of_the_layers_has_every_package_above_what_it_imports() -> None:
    texts = re.findall(r'<text class="name" x="\d+" y="(\d+)">(.*?)</text>', (DOCS / "layers.svg").read_text())
    height = {name: int(y) for y, names in texts for name in names.split(", ")}
    files = sorted({*(ROOT / "dgc").rglob("*.py")} - {ROOT / "dgc/__init__.py"})
    assert {name for name in height if name.startswith("dgc.")} == {package_of(path) for path in files}
    edges = {edge for path in files for edge in imports(path)}
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


def test_the_citation_has_the_papers_of_the_code() -> None:
    """Those that dgc/ names by arXiv number or DOI, and in docs/methods.md."""
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
    used = set(re.findall(r"`make (\w+)`|^ *make(?: --\S+)* (\w+)", text, re.M))
    used = {first or second for first, second in used}
    assert {"setup", "lint", "types", "test", "proof"} <= used <= targets, used - targets
    packages = commands[0].split("install -y ")[1].split()
    assert set(packages) - {"make"} <= set(re.findall(r"[\w+]+(?:-\w+)*", (ROOT / "scripts/setup.sh").read_text()))


def test_no_file_has_marks_of_an_unfinished_merge() -> None:
    folders = ("dgc*", "docs", "configs", "benchmarks", "scripts", "examples", "tests")
    files = [
        *ROOT.glob("*.md"),
        *(file for folder in folders for file in ROOT.glob(f"{folder}/**/*.*") if file.is_file()),
    ]
    kinds = {".py", ".md", ".h", ".cpp", ".html", ".sh"}
    texts = {file: file.read_text() for file in files if file.suffix in kinds and file.is_file()}
    assert len(texts) > 400
    assert [str(file) for file, text in texts.items() if re.search(r"^(<{7}|>{7}) ", text, re.M)] == []
