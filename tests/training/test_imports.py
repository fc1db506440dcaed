"""The modules and folders of dgc_training import each other without cycles."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def node(module: str) -> str:
    """The folder of a module below dgc_training, or the module itself if it is in dgc_training."""
    return module.split(".")[1]


def test_folders_have_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path in (ROOT / "dgc_training").rglob("*.py"):
        if path.parent.name == "dgc_training" and path.name == "__init__.py":
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        imported = graph.setdefault(node(name), set())
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("dgc_training."):
                imported.add(node(statement.module or ""))
        imported.discard(node(name))
    assert len(graph) > 10
    TopologicalSorter(graph).prepare()  # raises CycleError with the cycle
