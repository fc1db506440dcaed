"""Faults: small changes of the source, made by the operators of mutmut and drawn with a seed."""

import ast
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from libcst.metadata import CodeRange, MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation.mutators import mutation_operators

# nothing in these is a fault that a test can find: types, names, messages, and what cannot happen
SKIPPED = (cst.Annotation, cst.Assert, cst.Decorator, cst.FormattedString, cst.Import, cst.ImportFrom, cst.Raise)
# calls of text for humans, and of types
SKIPPED_CALLS = {"cast", "NewType", "overload", "print", "TypeVar", "warn"}
# without these a call gives the same result, on a CPU and for correct arguments
SKIPPED_ARGUMENTS = {"device", "flush", "non_blocking", "pin_memory", "stacklevel", "strict"}
SKIPPED_CONDITIONS = {"TYPE_CHECKING", '__name__ == "__main__"'}


@dataclass(frozen=True)
class Fault:
    """A change of one expression or statement, of the code `old` to `new`, made by `operator`."""

    file: str  # from the root of the repository
    function: str  # class and function that hold the change; empty in a module
    line: int
    operator: str
    old: str
    new: str
    lines: range  # the change has an effect only if one of these runs
    source: "Source"
    nodes: tuple[cst.CSTNode, cst.CSTNode]

    @property
    def package(self) -> str:
        """The folder or file below dgc or dgc_training, such as dgc/gossip."""
        return "/".join(Path(self.file).with_suffix("").parts[:2])

    @property
    def key(self) -> str:
        """Does not change with code elsewhere in the file."""
        return f"{self.file}:{self.function}:{self.operator}: {self.old} -> {self.new}"

    @cached_property
    def code(self) -> str:
        """The whole file with the change."""
        changed = self.source.module.deep_replace(*self.nodes)
        assert isinstance(changed, cst.Module)
        return changed.code

    def is_one(self) -> bool:
        """Whether the file with the change is valid, and other code than without it."""
        try:
            return ast.dump(ast.parse(self.code)) != ast.dump(ast.parse(self.source.module.code))
        except SyntaxError:
            return False


class Source(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)

    def __init__(self, root: Path, file: str) -> None:
        super().__init__()
        self.file = file
        self.faults: list[Fault] = []
        wrapper = MetadataWrapper(cst.parse_module((root / file).read_text()))
        self.module = wrapper.module
        wrapper.visit(self)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self.is_skipped(node):
            return False
        for kind, operator in mutation_operators:
            for changed in operator(node) if isinstance(node, kind) else ():
                if not (isinstance(node, cst.Call) and is_skipped_argument(node, changed)):
                    self.faults.append(self.fault(operator.__name__.removeprefix("operator_"), node, changed))
        return True

    def is_skipped(self, node: cst.CSTNode) -> bool:
        match node:
            case cst.SimpleString():
                return " " in node.value or isinstance(self.parent(node), cst.Expr)
            case cst.Call(func=cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name))):
                return name in SKIPPED_CALLS
            case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))]):  # of types
                return name == "__all__" or (name[:1].isupper() and not name.isupper())
            case cst.Arg(keyword=cst.Name(value=name)):
                return name in SKIPPED_ARGUMENTS
            case cst.AnnAssign(annotation=cst.Annotation(annotation=cst.Name(value="TypeAlias"))):
                return True
            case cst.If():
                return self.module.code_for_node(node.test) in SKIPPED_CONDITIONS
        return isinstance(node, SKIPPED)

    def fault(self, operator: str, node: cst.CSTNode, changed: cst.CSTNode) -> Fault:
        position, names = self.position(node), [*self.names(node)]
        old, new = (" ".join(self.module.code_for_node(each).split()) for each in (node, changed))
        line, function = position.start.line, ".".join(reversed(names))
        return Fault(self.file, function, line, operator, old, new, self.lines(node), self, (node, changed))

    def lines(self, node: cst.CSTNode) -> range:
        """The lines of the statement, or of its head; the lines of the body, for what defines it."""
        inner: cst.CSTNode = node
        while not isinstance(inner, cst.SimpleStatementLine | cst.BaseCompoundStatement | cst.Module):
            inner, node = self.parent(inner), inner
        home: cst.CSTNode = inner
        while not isinstance(home, cst.FunctionDef | cst.ClassDef | cst.Module):
            home = self.parent(home)
        if isinstance(home, cst.FunctionDef):
            node = home.body if home is inner else inner if isinstance(inner, cst.SimpleStatementLine) else node
        else:
            has_functions = isinstance(home, cst.ClassDef) and m.findall(home.body, m.FunctionDef())
            node = home if has_functions else self.module
        position = self.position(node)
        return range(position.start.line, position.end.line + 1)

    def names(self, node: cst.CSTNode) -> Iterator[str]:
        while not isinstance(node, cst.Module):
            node = self.parent(node)
            if isinstance(node, cst.FunctionDef | cst.ClassDef):
                yield node.name.value

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        return self.get_metadata(ParentNodeProvider, node)

    def position(self, node: cst.CSTNode) -> CodeRange:
        return self.get_metadata(PositionProvider, node)


def is_skipped_argument(call: cst.Call, changed: cst.CSTNode) -> bool:
    """Whether the change is to an argument without an effect, or has no argument where one is needed."""
    if not isinstance(changed, cst.Call) or len(call.args) == len(changed.args) == 0:
        return False
    kept = {id(argument) for argument in changed.args}
    gone = [argument.keyword.value for argument in call.args if id(argument) not in kept and argument.keyword]
    of_types = isinstance(call.func, cst.Name) and call.func.value in ("isinstance", "len")
    return of_types or any(name in SKIPPED_ARGUMENTS for name in gone)


def drawn(root: Path, packages: Sequence[str], count: int, seed: int) -> list[Fault]:
    """Draws at least `count` faults: of each package in proportion to its size, evenly from the operators.

    The order of faults comes from hashes of their keys. After a change elsewhere in a package, most of the same
    faults are drawn.
    """
    possible: defaultdict[str, list[Fault]] = defaultdict(list)
    for package in packages:
        folder = root / package
        for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
            possible[package] += Source(root, str(path.relative_to(root))).faults
    total = sum(map(len, possible.values()))
    shares = ((faults, math.ceil(count * len(faults) / total)) for faults in possible.values())
    return [fault for faults, share in shares for fault in drawn_from(faults, share, seed)]


def drawn_from(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    by_operator: defaultdict[str, dict[str, Fault]] = defaultdict(dict)
    for fault in faults:
        by_operator[fault.operator].setdefault(hashlib.sha256(f"{seed} {fault.key}".encode()).hexdigest(), fault)
    columns = sorted(sorted(each.items()) for each in by_operator.values())
    mixed = (each[1] for row in zip_longest(*columns) for each in row if each is not None)
    return list(islice(filter(Fault.is_one, mixed), count))
