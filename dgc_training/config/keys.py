"""What the keys of a tree accept: values of a type, and nodes that name their constructor."""

import inspect
import re
from dataclasses import dataclass
from typing import Any

from dgc_training.constructors import signature

# Kinds of values, as messages name them.
_KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
_KINDS |= {"list": "a list", "dict": "a mapping", "Config": "a node that names its constructor (_target_)"}
# Kinds and further words for them in annotations. An annotation with any other word accepts every value.
_ALIASES = {"list": "List tuple Tuple Sequence Iterable Collection", "None": "NoneType Optional"}
_ALIASES |= {"": "Union Tensor torch typing collections abc dgc_training config tree"}
_WORDS = {word: kind for kind in (*_KINDS, *_ALIASES) for word in f"{kind} {_ALIASES.get(kind, '')}".split()}
_NODES = {"Config", "None"}


@dataclass(frozen=True)
class Key:
    """What a key of the tree accepts. The root base declares its keys: `configs.seed = Key(int, 42, least=0)`.

    Args:
        type: bool, int, float, str, list, dict, Config (a node that names its constructor), or a union of them.
        default: value before any other file. If it is None, but `type` is not, an experiment must set the key.
        least: the smallest value.
        items: what the values of a mapping with free names accept.
    """

    type: Any
    default: Any = None
    least: float | None = None
    items: "Key | None" = None

    def kinds(self) -> set[str]:
        """The kinds of accepted values; empty: every value."""
        words = re.findall(r"\w+", inspect.formatannotation(self.type))
        return {_WORDS[word] for word in words} - {""} if _WORDS.keys() >= set(words) else set()

    def wanted(self, value: Any) -> str:
        """What the value must be instead; '' if it is accepted. 100.0 is accepted as a whole number."""
        kinds, fitting = self.kinds(), kinds_of(value)
        too_small = self.least is not None and "float" in fitting and not value >= self.least
        if not kinds or kinds.intersection(fitting) and not too_small:
            return ""
        names = [name for kind, name in _KINDS.items() if kind in kinds and (kind != "Config" or kinds <= _NODES)]
        return " or ".join(names) + (f", at least {self.least}" if self.least is not None else "")


ANYTHING = Key(Any)


def key_of(kinds: set[str], default: Any = None) -> Key:
    """Accepts these kinds, null and a node, of which the constructor gets the object. Without kinds: anything."""
    return Key(" | ".join(kinds | _NODES) if kinds - _NODES else Any, default)


def kinds_of(value: Any) -> list[str]:
    """The kind of a value, and the other kind that it is accepted as. "None", or keys of `_KINDS`."""
    kind = "None" if value is None else type(value).__name__
    if isinstance(value, dict):
        return ["Config", "dict"] if "_target_" in value else ["dict"]
    if kind == "int" or kind == "float" and value.is_integer():
        return [kind, "float" if kind == "int" else "int"]
    return [kind]


def keywords(target: Any) -> dict[str, Key] | None:
    """What the keywords of `target` accept, by annotation or default. None if it accepts any keyword."""
    parameters = signature(target).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    keys = {"_target_": Key(str), "_partial_": Key(bool)}
    for p in parameters:
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            # A default of 0 is common where fractions are accepted.
            default = {bool: "bool", int: "int | float", float: "float", str: "str"}.get(type(p.default), Any)
            keys[p.name] = key_of(Key(default if p.annotation is p.empty else p.annotation).kinds(), p.default)
    return keys
