"""CITATION.cff, the CI workflow and CONTRIBUTING agree with the repository."""

import os
import re
from pathlib import Path

import yaml

import dgc

ROOT = Path(__file__).parent.parent
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
