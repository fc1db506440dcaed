"""Translation with a trained Transformer: greedy decoding and beam search, in batches.

Beam search looks for the target y of at most `max_length` tokens, its end included, with the largest

    score(y) = sum_i log p(y_i | y_<i, source) / ((5 + |y|) / 6)^length_penalty

Wu et al., Google's Neural Machine Translation System, https://arxiv.org/abs/1609.08144, equation 14, without its
coverage penalty. At every length it continues the `beams` most probable targets that have not ended. A target that
ends leaves them, so they stay `beams` many. A sentence is done when no continuation can exceed the best target
that has ended: the logarithms are at most 0, so a sum only falls, and the denominator is largest at the sentence's
`max_length`.

Differences from the paper:

- Its pruning, and usual beam searches, end a target only where the end is among the best candidates. Here the end
  is scored after every target that is continued, at every length, so short targets always compete.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dgc_models.transformer import Transformer


@torch.no_grad()
def greedy(
    model: Transformer,
    source: Tensor,
    *,
    begin: int,
    end: int,
    max_length: int | Sequence[int] | Tensor,
    vocabulary: int | None = None,
) -> list[list[int]]:
    """The most probable token at each position, up to `end`.

    Args:
        model: in evaluation mode.
        source: int64 [sentences, source length].
        begin: the token that begins a target.
        end: the token that ends a target.
        max_length: the most tokens of a target, its end included, or int64 [sentences]: the most of each.
        vocabulary: a target has only tokens below this number; None: all of the model.

    Returns:
        The tokens of each target, without `begin` and `end`.
    """
    if not len(source):
        return []
    limits = _limits(max_length, source)
    state = model.encode(source)
    tokens = source.new_full((len(source), 1), begin)
    has_ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    for length in range(1, int(limits.max()) + 1):
        logits = _allowed(model.next_logits(tokens[:, -1:], state)[:, -1], begin, model.padding, vocabulary)
        tokens = torch.cat([tokens, logits.argmax(1, keepdim=True)], 1)
        has_ended |= (tokens[:, -1] == end) | (limits <= length)
        if bool(has_ended.all()):
            break
    rows = zip(tokens[:, 1:].tolist(), limits.tolist(), strict=True)
    return [_until(row[:limit], end) for row, limit in rows]


@torch.no_grad()
def beam_search(
    model: Transformer,
    source: Tensor,
    *,
    begin: int,
    end: int,
    max_length: int | Sequence[int] | Tensor,
    vocabulary: int | None = None,
    beams: int = 4,
    length_penalty: float = 0.6,
) -> list[list[int]]:
    """The target with the largest score of those that the search finds.

    With one beam it may differ from `greedy`, which stops at the first end.

    Args:
        model: in evaluation mode.
        source: int64 [sentences, source length].
        begin: the token that begins a target.
        end: the token that ends a target.
        max_length: the most tokens of a target, its end included, or int64 [sentences]: the most of each.
        vocabulary: a target has only tokens below this number; None: all of the model.
        beams: number of targets of each sentence that are continued.
        length_penalty: the exponent; 0: none, larger: longer targets.

    Returns:
        The tokens of each target, without `begin` and `end`.

    Raises:
        ValueError: if `beams` or `length_penalty` is out of range.
    """
    if beams < 1:
        raise ValueError(f"beams is {beams}; it must be at least 1")
    if not length_penalty >= 0:
        raise ValueError(f"length_penalty is {length_penalty}; it must be 0 or more")
    sentences, device = len(source), source.device
    if sentences == 0:
        return []

    def penalty(length: int) -> float:
        return float(((5 + length) / 6) ** length_penalty)

    limits = _limits(max_length, source)
    penalty_at_limit = torch.tensor([penalty(limit) for limit in limits.tolist()], device=device)
    state = model.encode(source.repeat_interleave(beams, 0))
    first_row = torch.arange(sentences, device=device)[:, None] * beams
    tokens = source.new_full((sentences, beams, 1), begin)
    # All beams of a sentence begin equal. Only one is continued at first.
    sums = torch.full((sentences, beams), -torch.inf, device=device)
    sums[:, 0] = 0
    best_score = torch.full((sentences,), -torch.inf, device=device)
    best: list[list[int]] = [[] for _ in range(sentences)]
    for length in range(1, int(limits.max()) + 1):
        logits = model.next_logits(tokens.flatten(0, 1)[:, -1:], state)[:, -1]
        allowed = _allowed(logits.float(), begin, model.padding, vocabulary)
        candidates = sums[:, :, None] + allowed.log_softmax(1).view(sentences, beams, -1)
        score, beam = (candidates[:, :, end] / penalty(length)).max(1)
        score = score.masked_fill(limits < length, -torch.inf)
        for sentence in (score > best_score).nonzero().flatten().tolist():
            best[sentence] = tokens[sentence, beam[sentence], 1:].tolist()
        best_score = torch.maximum(best_score, score)
        candidates[:, :, end] = -torch.inf
        sums, chosen = candidates.flatten(1).topk(beams)
        if bool(((limits <= length) | (sums[:, 0] / penalty_at_limit <= best_score)).all()):
            break
        beam = chosen // candidates.size(2)
        rows = (first_row + beam).flatten()
        tokens = torch.cat([tokens.flatten(0, 1)[rows].view(sentences, beams, -1),
                            (chosen % candidates.size(2))[:, :, None]], 2)  # fmt: skip
        state.reorder(rows)
    return best


def _limits(max_length: int | Sequence[int] | Tensor, source: Tensor) -> Tensor:
    """The most tokens of each target, int64 [sentences]."""
    return torch.as_tensor(max_length, dtype=torch.int64, device=source.device).expand(len(source))


def _allowed(logits: Tensor, begin: int, padding: int, vocabulary: int | None) -> Tensor:
    """The logits, with minus infinity for tokens that no target contains."""
    logits = logits.clone()
    logits[:, [begin, padding]] = -torch.inf
    if vocabulary is not None:
        logits[:, vocabulary:] = -torch.inf
    return logits


def _until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
