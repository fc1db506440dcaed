"""The faults of `make mutants`: what is changed, and what is not."""

from pathlib import Path

from scripts.mutants.copies import ROOT
from scripts.mutants.faults import Source, drawn
from scripts.mutants.packages import PACKAGES

CODE = '''"""A module = 1."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import a as b
__all__ = ["double"]
Pair = tuple[int, "x"]
LIMIT = 3

def double(x: Float[Tensor, "n"], device: str = "cpu") -> int:
    """Double it = 2."""
    assert x > 0, "never"
    if x > LIMIT:
        raise ValueError(f"{x} > {LIMIT}")
    warn("a + b")
    return zeros(x, device=device) + x
'''


def test_only_what_has_an_effect_is_changed(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(CODE)
    faults = Source(tmp_path, "module.py").faults
    assert sorted({(fault.old, fault.new) for fault in faults}) == [
        ('"cpu"', '"CPU"'),
        ('"cpu"', '"XXcpuXX"'),
        ("3", "4"),
        ("> LIMIT", ">= LIMIT"),
        ("LIMIT = 3", "LIMIT = None"),
        ("zeros(x, device=device)", "zeros(None, device=device)"),
        ("zeros(x, device=device)", "zeros(device=device)"),
        ("zeros(x, device=device) + x", "zeros(x, device=device) - x"),
    ]
    lines = {fault.old: (fault.function, fault.line, fault.lines) for fault in faults}
    assert lines["3"] == ("", 7, range(1, 17))  # any line of the module
    assert lines['"cpu"'] == ("double", 9, range(10, 16))  # any line of the function
    assert lines["> LIMIT"] == ("double", 12, range(12, 13))
    for fault in faults:
        pairs = zip(CODE.splitlines(), fault.code.splitlines(), strict=True)
        assert fault.is_one() and sum(old != new for old, new in pairs) == 1


def test_a_seed_draws_the_same_faults_of_each_operator() -> None:
    def draw(seed: int) -> list[str]:
        return [fault.key for fault in drawn(ROOT, ["dgc/state", "dgc/bucket"], 8, seed)]

    assert (keys := draw(1)) == draw(1) != draw(2)
    assert len(keys) >= 8 and len({key.split(":")[2] for key in keys}) > 4


def test_every_package_has_tests() -> None:
    found = {
        "/".join(path.relative_to(ROOT).with_suffix("").parts[:2])
        for folder in ("dgc", "dgc_training")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert found - {"dgc/__init__", "dgc_training/__init__"} == {*PACKAGES}
    paths = {path for tests in PACKAGES.values() for path in (*tests.own, *tests.ranks)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
