"""The Transformer: sizes, masks, the decoder's state; both ways of decoding against their definitions."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dgc_models.decoding import beam_search, greedy
from dgc_models.transformer import Transformer, sinusoids, transformer_base, transformer_big
from dgc_models.transformer_layers import DecoderState

BEGIN, END = 2, 3


def small(vocabulary: int = 6, pre_norm: bool = False, seed: int = 0) -> Transformer:
    """An untrained model whose logits are spread, so that no two targets have nearly the same score."""
    torch.manual_seed(seed)
    model = Transformer(vocabulary, width=16, heads=2, hidden=32, layers=2, pre_norm=pre_norm, max_length=20)
    with torch.no_grad():
        model.embedding.weight.mul_(3)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def test_sizes_and_positions() -> None:
    for make, expected in ((transformer_base, 60_522_496), (transformer_big, 209_125_376)):
        with torch.device("meta"):
            model = make(32_000)
        assert sum(p.numel() for p in model.parameters()) == expected
        assert f"{expected:,} parameters" in (make.__doc__ or "")
    encoding = sinusoids(50, 8)
    assert encoding.shape == (50, 8)
    for position, column in ((0, 0), (7, 3), (49, 6)):
        angle = position / 10_000 ** (2 * (column // 2) / 8)
        assert encoding[position, column] == pytest.approx((math.cos if column % 2 else math.sin)(angle), abs=1e-6)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_logits_and_gradients(pre_norm: bool) -> None:
    model = small(9, pre_norm)
    # later tokens do not change earlier logits
    source, target = torch.randint(4, 9, (3, 5)), torch.randint(4, 9, (3, 6))
    before = model(source, target)
    for position in range(1, 6):
        changed = target.clone()
        changed[:, position:] = torch.randint(4, 9, (3, 6 - position))
        assert torch.allclose(model(source, changed)[:, :position], before[:, :position], atol=1e-6)
    changed = target.clone()
    changed[:, 2] = (changed[:, 2] - 3) % 5 + 4  # another token
    assert ((model(source, changed) - before)[:, 2:].abs().amax(2) > 1e-4).all()
    # nor does padding
    longer = torch.cat([source, torch.zeros(3, 3, dtype=torch.int64)], 1)
    more = torch.cat([target, torch.zeros(3, 2, dtype=torch.int64)], 1)
    found = model(longer, more)
    assert torch.allclose(found[:, :6], before, atol=1e-5) and found.isfinite().all()
    other = torch.cat([source, torch.full((3, 3), 5)], 1)
    assert not torch.allclose(model(other, more)[:, :6], found[:, :6], atol=1e-2)
    # one token at a time gives the logits of all at once
    source[1, 3:] = 0
    state = model.encode(source)
    steps = [model.next_logits(target[:, [position]], state) for position in range(6)]
    assert torch.allclose(torch.cat(steps, 1), model(source, target), atol=1e-5) and state.length == 6
    # every parameter gets a gradient
    model.train()(source, target).square().mean().backward()
    for name, parameter in model.named_parameters():
        # A softmax does not change with a constant that is added to all its inputs.
        if not name.endswith("key.bias"):
            assert parameter.grad is not None and parameter.grad.any(), name


def log_probability(model: Transformer, source: Tensor, target: tuple[int, ...]) -> float:
    """Sum of the logarithms over the target, which ends in END, where BEGIN and padding cannot occur."""
    logits = model(source[None], torch.tensor([[BEGIN, *target[:-1]]]))[0].detach()
    logits[:, [0, BEGIN]] = -torch.inf
    return float(logits.log_softmax(1)[range(len(target)), list(target)].sum())


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("max_length", [1, 4])
def test_beam_search_finds_what_a_search_of_all_targets_finds(length_penalty: float, max_length: int) -> None:
    """With as many beams as there are targets. The vocabulary has 3 tokens beside the end."""
    tokens = [1, 4, 5]
    targets = [(*words, END) for n in range(max_length) for words in itertools.product(tokens, repeat=n)]
    lengths = set()
    for seed in range(4):
        model = small(seed=seed)
        source = torch.randint(4, 6, (3, 5))
        source[1, 2:] = 0
        options: Any = {"max_length": max_length, "length_penalty": length_penalty}
        found = beam_search(model, source, begin=BEGIN, end=END, beams=27, **options)
        for sentence, result in zip(source, found, strict=True):
            scores = {
                target: log_probability(model, sentence, target) / ((5 + len(target)) / 6) ** length_penalty
                for target in targets
            }
            best = max(scores, key=lambda target: scores[target])
            assert scores[(*result, END)] == pytest.approx(scores[best], abs=1e-5)
            lengths.add(len(result))
    assert len(lengths) > 1 or max_length == 1


class ByLength:
    """Stands in for a model: fixed probabilities of (1, END) at each length, whatever the tokens are.

    Those of a length may be a list, of one pair for each row.
    """

    padding = 0

    def __init__(self, *probabilities: Any) -> None:
        self.probabilities = probabilities

    def encode(self, source: Tensor) -> Any:
        self.length = 0
        return DecoderState([], source)

    def next_logits(self, tokens: Tensor, state: Any) -> Tensor:
        logits = torch.full((len(tokens), 1, 4), -torch.inf)
        logits[:, 0, [1, END]] = torch.tensor(self.probabilities[self.length]).log()
        self.length += 1
        return logits


def test_the_search_goes_on_while_a_longer_target_may_be_better() -> None:
    """The target that ends at once has the probability 0.6; the one of two tokens 0.4, with a larger score."""
    model: Any = ByLength((0.4, 0.6), (0.0, 1.0))
    options: Any = {"begin": BEGIN, "end": END, "max_length": 2, "beams": 1}
    source = torch.tensor([[5]])
    assert beam_search(model, source, length_penalty=0.6, **options) == [[]]
    assert beam_search(model, source, length_penalty=5.0, **options) == [[1]]
    assert math.log(0.4) / (7 / 6) ** 5 > math.log(0.6) > math.log(0.4) / (7 / 6) ** 0.6


def test_the_search_ends_when_no_sentence_can_have_a_better_target_within_its_limit() -> None:
    """The second sentence has a target of probability 1. The first has reached its limit, 1, or no target of 2
    tokens can be better than its best one: 3 could, but are too many for it."""
    source = torch.tensor([[5], [5]])
    cases: Any = [((0.9, 0.1), [1, 5], 5.0, [[1], []]), ((0.4, 0.6), [2, 3], 3.0, [[], []])]
    for first, limits, length_penalty, with_the_larger_limit in cases:
        for given, calls, expected in ((limits, 1, [[], []]), (limits[1], 2, with_the_larger_limit)):
            model: Any = ByLength([first, (0.0, 1.0)], *[(0.0, 1.0)] * 4)
            options: Any = {"begin": BEGIN, "end": END, "beams": 1, "length_penalty": length_penalty}
            found = beam_search(model, source, max_length=given, **options)
            assert (model.length, found) == (calls, expected)


SEARCHES = pytest.mark.parametrize("search", [greedy, beam_search])


@SEARCHES
def test_every_sentence_has_its_own_limit(search: Any) -> None:
    limits, lengths = [1, 9, 4, 2, 7], set()
    for seed in range(5):
        model, source = small(9, seed=seed), torch.randint(4, 9, (5, 6))
        options = {"begin": BEGIN, "end": END} | ({"length_penalty": 2.0} if search is beam_search else {})
        pairs = zip(source, limits, strict=True)
        alone = [search(model, sentence[None], max_length=limit, **options)[0] for sentence, limit in pairs]
        for given in (limits, torch.tensor(limits)):
            assert search(model, source, max_length=given, **options) == alone
        assert search(model, source[:0], max_length=[], **options) == []
        lengths |= set(map(len, alone))
    assert len(lengths) > 2
    # a batch is translated as its sentences are
    model, source = small(9, seed=5), torch.randint(4, 9, (5, 6))
    for row, length in enumerate((6, 1, 4, 2, 5)):
        source[row, length:] = 0
    options = {"begin": BEGIN, "end": END, "max_length": 8}
    alone = [search(model, sentence[sentence != 0][None], **options)[0] for sentence in source]
    assert search(model, source, **options) == alone and search(model, source[:0], **options) == []


@SEARCHES
def test_tokens_beyond_the_vocabulary_are_in_no_target(search: Any) -> None:
    options, chosen = {"begin": BEGIN, "end": END, "max_length": 8}, set()
    for seed in range(4):
        model, source = small(9, seed=seed), torch.randint(4, 6, (5, 6))
        chosen |= set(sum(search(model, source, **options), []))
        found = search(model, source, vocabulary=6, **options)
        assert any(found) and max(sum(found, [])) < 6
    assert max(chosen) >= 6


def test_greedy_takes_the_most_probable_token_each_time() -> None:
    model, source = small(9, seed=2), torch.randint(4, 9, (4, 5))
    found = greedy(model, source, begin=BEGIN, end=END, max_length=7)
    for sentence, result in zip(source, found, strict=True):
        tokens: list[int] = []
        while len(tokens) < 7 and tokens[-1:] != [END]:
            logits = model(sentence[None], torch.tensor([[BEGIN, *tokens]]))[0, -1].detach()
            logits[[0, BEGIN]] = -torch.inf
            tokens.append(int(logits.argmax()))
        assert result == [token for token in tokens if token != END]


def test_impossible_arguments_are_refused() -> None:
    arguments: Any
    for arguments, message in (
        ({"width": 20, "heads": 4}, "width is 20; it must be a multiple of 2 \\* heads, 8"),
        ({"layers": 0}, "layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"padding": 8}, "padding is 8"),
    ):
        with pytest.raises(ValueError, match=message):
            Transformer(8, **arguments)
    model, source = small(), torch.tensor([[4, 5]])
    for options, message in (({"beams": 0}, "beams is 0"), ({"length_penalty": -1.0}, "length_penalty is -1.0")):
        with pytest.raises(ValueError, match=message):
            beam_search(model, source, begin=BEGIN, end=END, max_length=3, **options)
    with pytest.raises(ValueError, match="a sentence has 21 tokens; max_length of the model is 20"):
        model.encode(torch.full((1, 21), 4))
