"""Imports only point down: the contracts in pyproject.toml, which import-linter checks. Time limits are scaled.

The source is read, not run. `lint-imports` sees the imports of all packages. The graph of these tests has also the
imports of train.py, as a module of dgc_training, and the strings that name a module or what is in it, such as
"dgc.compression.DGCCompressor". ruff checks who imports torch.distributed.
"""

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest
from environment import REPOSITORY, SLOWNESS, patient, python_path, slowness
from importlinter import Contract
from importlinter.api import read_configuration
from importlinter.contracts import acyclic_siblings, forbidden, layers, protected

CONFIG = read_configuration(str(REPOSITORY / "pyproject.toml"))
PACKAGES = CONFIG["session_options"]["root_packages"]
KINDS: dict[str, type[Contract]] = {
    "acyclic_siblings": acyclic_siblings.AcyclicSiblingsContract,
    "forbidden": forbidden.ForbiddenContract,
    "layers": layers.LayersContract,
    "protected": protected.ProtectedContract,
}
TRAIN = "dgc_training.train"
# packages that import nothing outside the standard library but these
OUTSIDE = {
    "dgc": {"torch", "numpy", "jaxtyping", "typing_extensions", "horovod", "mpi4py", "triton", "scipy"}
    | {"accelerate", "lightning", "transformers"},  # dgc.integrations
    "dgc_datasets": {"torch", "torchvision", "numpy", "sklearn", "PIL", "sentencepiece", "num2words"},
    "dgc_models": {"torch", "torchvision", "numpy"},
}
NAME = re.compile(r"\w+(\.\w+)+")

TESTS = Path(__file__).parent
# .run(..., timeout=60), .wait(60), .join(60), time.monotonic() + 60; of less than 5 seconds it is a pause
WITHIN = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"  # parentheses
CALLS = rf"\.(?:run|wait|join|communicate)\({WITHIN}\btimeout=|\.(?:wait|join)\("
LIMIT = re.compile(rf"(?:{CALLS}|time\.monotonic\(\) \+ )(\d[\d.]*)")


def names(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of strings and imports: `from a import b` gives "a.b"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
            yield node.lineno, node.value
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@cache
def graph() -> grimp.ImportGraph:
    found = grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)
    found.add_module(TRAIN)
    for module in found.find_modules_that_directly_import("train"):
        found.add_import(importer=module, imported=TRAIN)
    files = {TRAIN: REPOSITORY / "train.py"}
    for file in (file for package in PACKAGES for file in (REPOSITORY / package).rglob("*.py")):
        files[".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")] = file
    for module, file in files.items():
        for line, name in names(file.read_text()):
            other = name
            while other and other not in found.modules:
                other = other.rpartition(".")[0]
            # not the name of a message, "dgc.x"
            if other != module and ("." in other or other in ("horovod", "mpi4py")):
                found.add_import(importer=module, imported=other, line_number=line, line_contents=name)
    return found


def broken(imports: grimp.ImportGraph) -> set[str]:
    """The contracts that the imports break. The reasons are printed."""
    found = set()
    for options in CONFIG["contracts_options"]:
        contract = KINDS[options["type"]](options["name"], CONFIG["session_options"], options)
        check = contract.check(deepcopy(imports), verbose=False)
        if not check.kept:
            found.add(contract.name)
            contract.render_broken_contract(check)
    return found


def cycle(imports: grimp.ImportGraph) -> list[str]:
    """Modules that import each other, also a package and what is in it."""
    try:
        TopologicalSorter({m: imports.find_modules_directly_imported_by(m) for m in imports.modules}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_contracts_hold() -> None:
    assert not broken(graph())
    found = cycle(graph())
    assert not found, " -> ".join(found)


@pytest.mark.parametrize("package", OUTSIDE)
def test_a_package_imports_nothing_else_from_outside(package: str) -> None:
    modules = {package, *graph().find_descendants(package)}
    others = {other for module in modules for other in graph().find_modules_directly_imported_by(module)}
    outside = {name for name in others if graph().is_module_squashed(name)} - sys.stdlib_module_names
    assert outside <= OUTSIDE[package], f"{package} imports {outside - OUTSIDE[package]}"


def test_the_graph_has_every_folder_of_code() -> None:
    """Also train.py, and the strings that name a module."""
    assert {path.parent.name for path in REPOSITORY.glob("[!.]*/*.py")} - {"build", "tests"} == set(PACKAGES)
    named = [(TRAIN, "dgc.optim"), ("configs.wmt16", "dgc_training.schedule"), ("dgc.comm.connect", "horovod")]
    assert all(graph().direct_import_exists(importer=module, imported=other) for module, other in named)


def test_no_time_limit_is_a_bare_number() -> None:
    others = (path for path in TESTS.rglob("*.py") if path != Path(__file__))
    limits = {path.name: map(float, LIMIT.findall(path.read_text())) for path in others}
    assert [name for name, of in limits.items() if any(limit >= 5 for limit in of)] == []
    text = "x.run(c(d(1)),\n timeout=5)\np.wait(9)\np.wait(0.1)\nt.join(patient(9))\nx = time.monotonic() + 60"
    assert LIMIT.findall(text) == ["5", "9", "0.1", "60"]


@pytest.mark.timeout(50)
def test_the_limits_of_pytest_are_scaled() -> None:
    assert 40 * slowness() < signal.getitimer(signal.ITIMER_REAL)[0] <= 50 * slowness()
    assert slowness() >= 2 and patient(3) == 3 * slowness()


def test_a_started_process_knows_the_speed_of_the_machine() -> None:
    words = [sys.executable, "-c", "import environment; print(environment.slowness())"]
    told = subprocess.check_output(words, env={**os.environ, "PYTHONPATH": python_path(TESTS)}, text=True)
    assert float(told) == slowness() == float(os.environ[SLOWNESS])
