"""A fault: a change of one line that makes a program wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A fault and the tests that must detect it.

    Args:
        name: What is wrong. Unique among all faults.
        file: The file, from the root of the repository.
        old: A text within one line that occurs once in the file.
        new: The text that replaces it.
        tests: Files or node ids. At least one of these tests must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: Sequence[str]

    @property
    def room(self) -> str:
        """The package of the file, such as dgc/gossip."""
        top, *below = self.file.split("/")
        return f"{top}/{below[0].removesuffix('.py')}" if top == "dgc" else top.removesuffix(".py")

    @property
    def is_native(self) -> bool:
        """Whether the native library must be built again."""
        return self.file.endswith((".cpp", ".h"))

    def occurrences(self, root: Path) -> int:
        """How often the text is found below `root`. A missing file has none."""
        path = root / self.file
        return path.read_text().count(self.old) if path.is_file() else 0

    def apply(self, root: Path) -> None:
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))
