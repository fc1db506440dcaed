"""Lists all benchmarks: `python -m benchmarks`."""

import ast
from pathlib import Path


def main() -> None:
    """Print the name of each benchmark, how long it takes, and the first line of its docstring."""
    for file in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(file.read_text())
        values = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
        if "TAKES" in values:
            first = (ast.get_docstring(tree) or "").splitlines()[0]
            print(f"{file.stem:<20}{first}\n{'':20}{ast.literal_eval(values['TAKES'])}")


if __name__ == "__main__":
    main()
