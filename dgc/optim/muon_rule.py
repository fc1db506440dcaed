"""Which parameters of a model Muon takes, and which AdamW takes: by kind, shape and name.

Shape does not tell: an embedding, an output layer and the router of a mixture of experts are matrices, whose rows
belong to one token, class or expert each. Embeddings are found by their module, the others by the last words of
their names. The rules hold for the names in Hugging Face's transformers, torchvision, timm, torchtitan, fairseq
and Megatron. A layer that the rules cannot know, such as the last one of an nn.Sequential, is named in `head`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from dgc.core.arguments import FLAG, require
from dgc.launch import started_by

WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # the module in torch.compile and checkpoint_wrapper
GATES = {nn.LSTM: 4, nn.GRU: 3}
# the ends of modules' names, with their last words
EMBEDDINGS = ("*embedding", "*embeddings", "embed_tokens", "wte", "wpe")
ROUTERS = ("*router", "router.*", "gate.wg")
GATE = ("gate",)  # a router if it has fewer rows, its experts, than columns, unlike the gate of an MLP
HEADS = ("*head", "*heads", "*classifier", "*head.fc", *(f"*{kind}.out_proj" for kind in ("head", "classifier")))
# the names of output layers which layers of a block have too
OUTSIDE_BLOCKS = tuple(
    """
    output output_layer output_projection proj_out ff_out lm_output embed_out unembed unembedding
    lm_loss logits *to_logits *logits_proj score qa_outputs decoder decoder_pred seq_relationship vocab_projector
    text_projection visual_projection generator.proj final_layer.linear
    """.split()
)
AT_THE_TOP = ("fc",)
# names of parameters that no module of torch makes
TABLES = tuple("*embed* *position* *pos_* *_table *_token *_tokens *latents *bias A_log time_*".split())
NAMES_SHOWN = 3  # of vectors, in a row of the table
Parts = int | Sequence[int]


@dataclass(frozen=True)
class Choice:
    """What a parameter goes to, and why.

    Attributes:
        names: Its names, without the wrappers DDP, torch.compile and checkpoint_wrapper.
        is_muon: Whether Muon takes it.
        reason: In a few words.
        parts: Of a parameter of Muon, the matrices in it, see `muon_groups`.
    """

    names: tuple[str, ...]
    parameter: Tensor
    is_muon: bool
    reason: str
    parts: int | tuple[int, ...] = 1


class MuonGroups(list[dict[str, Any]]):
    """The parameter groups of `MuonWithAdamW`, as a list, with the reasons.

    Attributes:
        choices: What each parameter of the model goes to, and why.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], choices: Sequence[Choice]):
        super().__init__(groups)
        self.choices = tuple(choices)

    def description(self) -> str:
        """A table of what Muon and AdamW take, and why. Layers with equal names but for a number share a row."""
        rows: dict[tuple[str, ...], list[Choice]] = {}
        for choice in sorted(self.choices, key=lambda each: not each.is_muon):
            is_vector = choice.parameter.dim() < 2  # all in one row
            shape = "" if is_vector else " x ".join(map(str, choice.parameter.shape))
            layer = "" if is_vector else _numberless(choice.names[0])
            optimizer = "Muon" if choice.is_muon else "AdamW"
            rows.setdefault((optimizer, choice.reason, shape, layer), []).append(choice)
        cells = [("optimizer", "reason", "tensors", "shape", "name")]
        for (optimizer, reason, shape, _), own in rows.items():
            names = list(dict.fromkeys(" = ".join(map(_numberless, choice.names)) for choice in own))
            shown = ", ".join([*names[:NAMES_SHOWN], *[".."] * (len(names) > NAMES_SHOWN)])
            cells.append((optimizer, reason, str(len(own)), shape, shown))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        for optimizer, is_muon in (("Muon", True), ("AdamW", False)):
            sizes = [choice.parameter.numel() for choice in self.choices if choice.is_muon == is_muon]
            lines.append(f"{optimizer}: {len(sizes)} tensors, {sum(sizes):,} elements")
        return "\n".join(lines)


def muon_groups(
    model: nn.Module,
    head: Sequence[str] | None = None,
    split: Mapping[str, Parts] | None = None,
    matrices: Sequence[str] = (),
    experts: bool = True,
    show: bool = True,
) -> MuonGroups:
    """The parameter groups of `MuonWithAdamW`: first AdamW's, then Muon's. Rank 0 prints a table of them.

    Muon takes matrices, and stacks of the matrices of experts. AdamW takes vectors, convolutions, routers of
    experts, embeddings, also where the output layer shares them, and the output layer. Weights of
    nn.MultiheadAttention, nn.LSTM and nn.GRU are split into the matrices that they hold. `description()` of the
    result is the table of all parameters, with the reasons. docs/methods.md has the rules of names.

    Args:
        model: Its parameters get groups. Names are those without DDP, torch.compile and checkpoint_wrapper. A
            parameter that several modules share has all of its names.
        head: Patterns (as in a shell) of names of parameters for AdamW: the output layer, and matrices that are
            looked up like an embedding. None: the output layer by its usual names.
        split: For patterns of names, the number of equal parts of a matrix's rows, or the rows of each part:
            `{"*qkv.weight": 3}`.
        matrices: Patterns of names of matrices for Muon although they are named like an embedding, an output
            layer or a router.
        experts: Muon takes stacks [experts, rows, columns], as so many matrices. False: AdamW takes them.
        show: Print the table, on rank 0.

    Raises:
        ValueError: A pattern of `head` fits no parameter, or one of `split` or `matrices` no matrix; a matrix has
            other rows than its parts, or Muon has no matrix.

    Example:
        optimizer = MuonWithAdamW(muon_groups(model), lr=1e-3)
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"muon_groups takes a model, not {type(model).__name__}: muon_groups(model)")
    require("True or False", FLAG, experts=experts, show=show)
    choices = _choices(model, head, split or {}, matrices, experts)
    found: dict[Any, list[Tensor]] = {}
    for choice in choices:
        if choice.is_muon:
            found.setdefault(choice.parts, []).append(choice.parameter)
    if not found:
        raise ValueError("the model has no matrix for Muon, which leaves embeddings and the output layer to AdamW")
    others = [choice.parameter for choice in choices if not choice.is_muon]
    groups: list[dict[str, Any]] = [{"params": others, "muon": False}] if others else []
    groups += ({"params": own, "muon": True, "parts": parts} for parts, own in found.items())
    made = MuonGroups(groups, choices)
    started = started_by(os.environ)
    if show and (started is None or started.rank == 0):
        print(made.description(), flush=True)
    return made


def _choices(
    model: nn.Module,
    head: Sequence[str] | None,
    split: Mapping[str, Parts],
    matrices: Sequence[str],
    experts: bool,
) -> list[Choice]:
    names, fused = _names(model), dict(_fused(model))
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    last = {_stem(name): name for p, own in names.items() if p.dim() == 2 for name in own}
    choices, used = [], set[str]()
    for p, own in names.items():
        used.update(asked := _fitting(head or (), own))
        reason = _not_a_matrix(p, own)
        if reason is None and p in embeddings:
            reason = "embedding"
        if asked:
            reason = reason or f"head={asked[0]!r}"
        elif reason is None and (fit := _fitting(matrices, own)):
            used.update(fit)
        elif reason is None and p.dim() == 3:
            reason = None if experts else "experts=False"
        elif reason is None:
            reason = next((why for name in own if (why := _by_name(name, p, last, outputs=head is None))), None)
        if reason is not None:
            choices.append(Choice(tuple(own), p, False, reason))
            continue
        used.update(fit := _fitting(split, own))
        parts = split[fit[0]] if fit else fused.get(p, 1)
        rows_of(p.shape[-2:], parts)
        parts = parts if isinstance(parts, int) else tuple(parts)
        choices.append(Choice(tuple(own), p, True, _in_words(parts, p.dim() == 3), parts))
    for pattern in (*(head or ()), *split, *matrices):
        if pattern not in used:
            _refuse(pattern, pattern not in (head or ()), choices)
    return choices


def _refuse(pattern: str, of_matrices: bool, choices: Sequence[Choice]) -> None:
    """Raise ValueError for a pattern that fits nothing which it could have an effect on."""
    fitting = [choice for choice in choices if _fitting([pattern], choice.names)]
    if of_matrices and fitting:
        shape, reason = tuple(fitting[0].parameter.shape), fitting[0].reason
        raise ValueError(
            f"no matrix of Muon has a name like {pattern!r}: {fitting[0].names[0]} of shape {shape} is AdamW's "
            f"({reason})"
        )
    what = "matrix of Muon" if of_matrices else "parameter"
    first = [choice.names[0] for choice in choices][:5]
    raise ValueError(f"no {what} has a name like {pattern!r}; the first names are {first}")


def _not_a_matrix(p: Tensor, names: Sequence[str]) -> str | None:
    """Why the shape of a parameter is none for Muon."""
    if p.dim() < 2:
        return "vector"
    if p.dim() > 2 and not (p.dim() == 3 and any(map(_is_of_experts, names))):
        return f"{p.dim()} dimensions"
    return "one row or column" if min(p.shape[-2:]) < 2 else None


def _is_of_experts(name: str) -> bool:
    """Whether a parameter of this name is of all experts of a layer, and not of one in a numbered list."""
    words = name.split(".")
    first = next((i for i, word in enumerate(words) if "expert" in word or "moe" in word), len(words))
    return first < len(words) and not any(word.isdigit() for word in words[first:])


def _by_name(name: str, p: Tensor, last: Mapping[str, str], outputs: bool) -> str | None:
    """Why AdamW takes a matrix of this name. last: see `_is_output`. outputs: output layers count."""
    *words, leaf = name.split(".")
    if leaf != "weight":
        if any(fnmatchcase(leaf, pattern) for pattern in TABLES):
            return "table"
        words.append(leaf)
    if _ends(words, EMBEDDINGS):
        return "embedding"
    if _ends(words, ROUTERS) or (_ends(words, GATE) and p.shape[0] < p.shape[1]):
        return "router"
    return "output layer" if outputs and _is_output(name, words, last) else None


def _is_output(name: str, words: list[str], last: Mapping[str, str]) -> bool:
    """Whether a matrix is an output layer. last: the name of the last layer of each sequence, by its stem."""
    while words and words[-1].isdigit():
        *words, _ = words
        if words and not words[-1].endswith("s") and last[_stem(name)] != name:
            return False  # a hidden layer of a head
    # a model may be a stage in a list of them
    in_block = any(word.isdigit() for word in words[1:])
    known = (*HEADS, *(() if in_block else OUTSIDE_BLOCKS), *(AT_THE_TOP if len(words) == 1 else ()))
    return _ends(words, known)


def _ends(words: Sequence[str], patterns: Iterable[str]) -> bool:
    """Whether the last words of a name fit a pattern."""
    return any(
        fnmatchcase(".".join(words[-1 - pattern.count(".") :]), pattern) for pattern in patterns if len(words)
    )


def _stem(name: str) -> str:
    """The name of the sequence that has the module of a parameter: `classifier` of classifier.6.weight."""
    words = name.split(".")[:-1]
    while words and words[-1].isdigit():
        words.pop()
    return ".".join(words)


def _in_words(parts: int | tuple[int, ...], is_stack: bool) -> str:
    if parts == 1:
        return "stack of experts" if is_stack else "matrix"
    words = f"{parts} matrices" if isinstance(parts, int) else f"matrices of {', '.join(map(str, parts))} rows"
    return f"stack of experts, each {words}" if is_stack else words


def _numberless(name: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def _names(model: nn.Module) -> dict[Tensor, list[str]]:
    """The names of each parameter, without what the wrappers DDP, torch.compile and checkpoint_wrapper add."""
    wrapped = {
        f"{name}.module".lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    }
    names: dict[Tensor, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        words = name.split(".")
        outside = [i for i, w in enumerate(words) if w in WRAPPED or ".".join(words[: i + 1]) in wrapped]
        names.setdefault(p, []).append(".".join(w for i, w in enumerate(words) if i not in outside))
    return names


def _fitting(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The patterns that fit one of the names."""
    return [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]


def _fused(model: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """The weights that hold several matrices in modules of torch, and how many."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            yield module.in_proj_weight, 3
        for kind, gates in GATES.items():
            if isinstance(module, kind):
                of = (p for name, p in module.named_parameters() if name.startswith(("weight_ih", "weight_hh")))
                yield from ((p, gates) for p in of)


def rows_of(shape: Sequence[int], parts: Parts) -> list[int]:
    """The rows of each part of a matrix."""
    if not isinstance(parts, int):
        rows = list(parts)
    else:
        rows = [shape[0] // parts] * parts if parts > 0 else []
    if not rows or min(rows) < 1 or sum(rows) != shape[0]:
        raise ValueError(f"a matrix of shape {tuple(shape)} cannot be split into parts={parts}")
    return rows
