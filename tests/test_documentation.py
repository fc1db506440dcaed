"""Links, navigation and API pages of the documentation agree with the files and names that exist."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from documented import DOCS

from scripts.docs.links import ALWAYS, place, prose, reached, rewritten

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
