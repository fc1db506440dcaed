"""Draws docs/layers.svg: the packages, lowest layer below, each with the packages of dgc that it imports.

python -m tools.docs.layers
"""

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ANY = "any package below, but not dgc.paper"
# (class of the box, rows of (packages, what they are, what is said of their imports; None: as in the source))
BOXES: list[tuple[str, list[tuple[str, str, str | None]]]] = [
    (
        "program",
        [
            ("benchmarks, scripts, tools", "measurements, commands", ANY),
            ("examples", "your own loop in 60 lines", ANY),
            ("train.py, configs", "experiments", ANY),
            ("dgc_training", "the trainer", ANY),
        ],
    ),
    (
        "adapter",
        [
            ("integrations", "trainers of others", None),
            ("advise", "a command", None),
            ("doctor", "a command", None),
            ("contrib", "methods outside the core", "any package below, but not dgc.kernels"),
            ("advisor", "predicted times, checks", None),
            ("groups", "groups that come and go", None),
            ("fsdp", "FSDP2", None),
            ("local", "local steps", None),
            ("optim", "optimizers", None),
            ("ddp", "hook of DDP", None),
            ("aggregate", "lists of gradients", None),
            ("testing", "invariants", None),
            ("engine", "one step of any method", None),
        ],
    ),
    (
        "method",
        [
            ("paper", "as published", None),
            ("gossip", "averages with neighbours", None),
            ("compression, memory", "names for users", None),
            ("sparse", "a few elements", None),
            ("codes", "a few bits per element", None),
            ("lowrank", "factors of low rank", None),
        ],
    ),
    (
        "base",
        [
            ("core", "buckets, states, interface", None),
            ("comm", "requests, transports", None),
            ("kernels", "inner loops", None),
            ("launch, terminal", "rank, launcher", None),
            ("units, versions", "rates; torch", None),
            ("atomic_write, warn", "files; warnings", None),
            ("dgc_models, dgc_datasets", "networks, data", None),
        ],
    ),
]
STYLE = """<style>
  .page { fill: #ffffff; }
  .program { fill: #e8f5e9; stroke: #2e7d32; stroke-width: 1.5; }
  .adapter { fill: #eef2fb; stroke: #3f51b5; stroke-width: 1.5; }
  .method { fill: #fff6e5; stroke: #b26a00; stroke-width: 1.5; }
  .base { fill: #f3f3f5; stroke: #5f6368; stroke-width: 1.5; }
  .name { font: bold 16px Helvetica, Arial, sans-serif; fill: #16181d; }
  .head { font: bold 15px Helvetica, Arial, sans-serif; fill: #333333; }
  .text { font: 15px Helvetica, Arial, sans-serif; fill: #333333; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #16181d; }
    .head { fill: #cdd2d7; }
    .program { fill: #1d2b20; stroke: #81c784; }
    .adapter { fill: #1e2440; stroke: #8c9eff; }
    .method { fill: #33270f; stroke: #ffb74d; }
    .base { fill: #25282e; stroke: #a5adb6; }
    .name { fill: #f0f1f3; }
    .text { fill: #cdd2d7; }
  }
</style>"""
ROW, GAP = 27, 14


def imports_of(package: str) -> set[str]:
    """The packages of dgc that a package imports, without versions, units and warn."""
    place = ROOT / "dgc" / package
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {name.split(".")[1] for name in names if name.startswith("dgc" + ".")}
    return found - {package, "atomic_write", "units", "versions", "warn"}


def draw() -> str:
    lines, y = [], 46
    for kind, rows in BOXES:
        lines.append(f'<rect class="{kind}" x="20" y="{y}" width="920" height="{ROW * len(rows) + 12}" rx="6"/>')
        for i, (names, what, said) in enumerate(rows):
            at = y + 24 + ROW * i
            packages = [] if kind == "program" or "dgc_" in names else names.split(", ")
            found = sorted(set().union(*map(imports_of, packages)))
            text = said or ", ".join(found) or "nothing"
            full = ", ".join(f"dgc.{name}" for name in packages) or names
            for style, x, words in (("name", 36, full), ("text", 296, what), ("text", 516, text)):
                lines.append(f'<text class="{style}" x="{x}" y="{at}">{escape(words)}</text>')
        y += ROW * len(rows) + 12 + GAP
    heads = (36, "package, lowest layer below"), (296, "what it is"), (516, "imports, of dgc")
    title = "The packages, lowest layer below, each with what it imports"
    size = f'viewBox="0 0 960 {y + 6}" width="960" height="{y + 6}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title">',
            f'<title id="title">{title}</title>',
            STYLE,
            f'<rect class="page" width="960" height="{y + 6}" rx="8"/>',
            *(f'<text class="head" x="{x}" y="32">{text}</text>' for x, text in heads),
            *lines,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (ROOT / "docs/layers.svg").write_text(draw())
