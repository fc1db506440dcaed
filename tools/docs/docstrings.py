"""Extension of Griffe, which reads the docstrings for the site: their forms that it does not know.

Example:      code with or without prompts; Griffe knows `Examples:`, in which text without prompts is prose
a (int), b:   two arguments with one description
P[i][j]       which Markdown takes for a link
"""

import re
from textwrap import dedent, indent
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:\n((?:[ \t]+.*\n?|\n(?=[ \t]))+)", re.M)
ARGUMENTS = re.compile(r"^(?:Args|Attributes):\n((?:[ \t]+.*\n?|\n(?=[ \t]))+)", re.M)
SEVERAL = re.compile(r"^    (\w+[^:]*?,\s+\w[^:]*):(?=\s)", re.M)  # the names before a description


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = known_forms(obj.docstring.value)


def known_forms(text: str) -> str:
    """A docstring in the forms that Griffe and Markdown read."""
    text = re.sub(r"(\w\[\w+)\]\[", r"\1]\\[", text)
    text = ARGUMENTS.sub(lambda section: SEVERAL.sub(plain_names, section[0]), text)
    return EXAMPLE.sub(block, text)


def plain_names(header: re.Match[str]) -> str:
    """`a (int), b (float, optional):` as `a, b:`."""
    names = re.sub(r"\s*\([^()]*\)", "", header[1])
    if "," not in names:
        return header[0]
    return "    " + re.sub(r"\s+", " ", names) + ":"


def block(section: re.Match[str]) -> str:
    """The section of an example with a fenced block."""
    return "Example:\n" + indent(f"```python\n{dedent(section[1]).strip()}\n```", "    ") + "\n"
