"""Formulas in a config: values that are computed from other keys when they are read.

`${train.batch_size}` is OmegaConf's. `${derive:"train.num_epochs - 5"}` is a Python expression of numbers, keys of
numbers, + - * / // % **, min(...) and max(...), which simpleeval evaluates.
"""

import ast
import math
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError
from simpleeval import DEFAULT_OPERATORS, InvalidExpression, SimpleEval

from dgc_training.errors import short

SIGNS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.UAdd, ast.USub)
# Powers are computed with floats: the integer 9**9**9 would exhaust the memory.
OPERATORS: dict[type, Any] = {**{sign: DEFAULT_OPERATORS[sign] for sign in SIGNS}, ast.Pow: math.pow}
KNOWN = "keys, numbers, + - * / // % **, min(...) and max(...), up to 1000 characters"


def derived(formula: str) -> str:
    """A value that follows later files: derived("max(1, train.num_epochs - train.warmup_lr_epochs)").

    The value of a single key, derived("seed"), may have any type.
    """
    text = " ".join(formula.split())
    return f"${{{text}}}" if text.replace(".", "").isidentifier() else f'${{derive:"{text}"}}'


def is_formula(value: Any) -> bool:
    """Whether a value is computed when it is read. `???` is a value that is not set yet."""
    return isinstance(value, str) and ("${" in value or value == "???")


def derive(formula: str, *, _root_: DictConfig) -> float:
    """OmegaConf's resolver `derive`. OmegaConf reports any exception with the key of the formula."""

    def number(node: ast.Constant) -> float:
        if type(node.value) not in (int, float):
            raise TypeError
        return node.value  # type: ignore[return-value]

    def key(node: ast.expr) -> float:
        name = ast.unparse(node)
        if (value := OmegaConf.select(_root_, name, default=_root_)) is _root_:
            raise InterpolationKeyError(f"Interpolation key '{name}' not found")  # as for ${key}
        if type(value) not in (int, float):
            raise ValueError(f"{name} is {short(repr(value))}, not a number")
        return value

    evaluator = SimpleEval(OPERATORS, {"min": min, "max": max})
    evaluator.nodes = {kind: evaluator.nodes[kind] for kind in (ast.BinOp, ast.UnaryOp, ast.Call)}
    evaluator.nodes |= {ast.Constant: number, ast.Name: key, ast.Attribute: key}
    try:
        tree = ast.parse(formula.strip() if len(formula) <= 1000 else "", mode="eval")
        if any(isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) for node in ast.walk(tree)):
            raise TypeError
        return evaluator.eval(formula, tree.body)
    except (SyntaxError, TypeError, InvalidExpression):
        raise ValueError(f"{short(repr(formula))} is not made of {KNOWN}") from None


OmegaConf.register_resolver("derive", derive, replace=True, annotation_validation="off")
