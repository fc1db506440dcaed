"""Models: sizes, shapes, and that they learn; the Transformer, decoding, and the text that it translates."""

import itertools
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cases import case
from refusals import refuse
from torch import Tensor

import dgc_models
from dgc_datasets.translation import BEGIN, END, PADDING, NumberWords, ParallelText, TokenBatches, Vocabulary
from dgc_datasets.translation.number_words import draw_numbers
from dgc_datasets.translation.parallel_text import collate
from dgc_datasets.translation.vocabulary import train_vocabulary
from dgc_datasets.translation.wmt16 import main
from dgc_models import DigitsCNN, alexnet, resnet18, resnet20
from dgc_models.decoding import beam_search, greedy
from dgc_models.densenet_cifar import DenseLayer
from dgc_models.resnet_cifar import Bottleneck, Projection, ResNet, resnet_of_depth
from dgc_models.senet_cifar import PreActivationBlock, SqueezeExcitation
from dgc_models.transformer import Transformer, sinusoids, transformer_base, transformer_big
from dgc_models.transformer_layers import DecoderState

# the name, the parameters, the tensors, the matrices, the features
MODELS = [
    ("resnet20", 269_722, 59, 20, 64),
    ("resnet56", 853_018, 167, 56, 64),
    ("resnet110", 1_727_962, 329, 110, 64),
    ("resnet18", 11_173_962, 62, 21, 512),
    ("resnet50", 23_520_842, 161, 54, 2048),
    ("resnet101", 42_512_970, 314, 105, 2048),
    ("vgg16_bn", 14_728_266, 54, 14, 512),
    ("vgg19_bn", 20_040_522, 66, 17, 512),
    ("alexnet", 2_472_266, 12, 6, 256),
    ("senet18", 11_260_354, 88, 37, 512),
    ("densenet121", 6_956_298, 362, 121, 1024),
    ("densenet169", 12_493_322, 506, 169, 1664),
]
ENDS: Any = {"begin": BEGIN, "end": END}
TRAIN = [("ein Haus", "a house"), ("ein Hund", "a dog"), ("das Haus", "the house"), ("der Hund", "the dog")]
TEST = [("das Hundehaus", "the doghouse"), ("ein\u2028Haus", "a house")]


def test_sizes() -> None:
    for name, parameters, tensors, matrices, features in MODELS:
        with case(name), torch.device("meta"):
            model = getattr(dgc_models, name)()
            assert sum(p.numel() for p in model.parameters()) == parameters
            assert len(list(model.parameters())) == tensors
            assert sum(p.dim() > 1 for p in model.parameters()) == matrices
            assert model.classifier.weight.shape == (10, features)
            assert {"features.0.weight", "classifier.bias"} <= set(model.state_dict())
    for make, expected in ((transformer_base, 60_522_496), (transformer_big, 209_125_376)):
        with torch.device("meta"):
            model = make(32_000)
        assert sum(p.numel() for p in model.parameters()) == expected
        assert f"{expected:,} parameters" in (make.__doc__ or "")


@pytest.mark.parametrize("name", [row[0] for row in MODELS[3:]])
def test_the_larger_cifar_models(name: str) -> None:
    """The scale of the features neither explodes nor dies on the way, there and back."""
    torch.manual_seed(0)
    model = getattr(dgc_models, name)(num_classes=100)
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 100) and 0.05 < logits.std() < 5
    logits.square().mean().backward()
    for where, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), where


FOR_8 = [(name, 1, 8, 7) for name in ("resnet50", "densenet121", "senet18")]
FOR_48 = [(name, 1, 48, 7) for name in ("vgg19_bn", "alexnet")]


@pytest.mark.parametrize(
    ("name", "channels", "edge", "classes"), [*FOR_8, *FOR_48, ("resnet20", 3, 32, 10), ("resnet20", 3, 32, 100)]
)
def test_other_images(name: str, channels: int, edge: int, classes: int) -> None:
    model = getattr(dgc_models, name)(num_classes=classes, in_channels=channels)
    assert model(torch.randn(2, channels, edge, edge)).shape == (2, classes)


def test_all_stages_but_the_first_halve_the_image() -> None:
    for model, shape in ((resnet20(), (1, 64, 8, 8)), (resnet18(), (1, 512, 4, 4))):
        assert model.features[:-2](torch.randn(1, 3, 32, 32)).shape == shape


def test_the_model_of_the_digits() -> None:
    assert sum(p.numel() for p in DigitsCNN(num_classes=10).parameters()) == 226_794
    assert DigitsCNN(width=8)(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_the_logits_of_a_new_alexnet_differ_between_images() -> None:
    """Without batch norm only its initialisation keeps them from being the same for every image."""
    torch.manual_seed(0)
    with torch.no_grad():
        assert alexnet()(torch.randn(32, 3, 32, 32)).std(0).mean() > 0.03


def test_a_resnet_with_other_stages_is_refused() -> None:
    for depth in (2, 7, 21):
        refuse("6n", resnet_of_depth, depth)
    refuse("zip", ResNet, (16, 32), (1, 1, 1), Projection)


def test_blocks() -> None:
    block = Bottleneck(64, 256, 2)
    assert [tuple(p.shape[:2]) for p in block.body.parameters() if p.dim() == 4] == [(64, 64), (64, 64), (256, 64)]
    assert isinstance(block.shortcut, Projection) and block(torch.randn(2, 64, 8, 8)).shape == (2, 256, 4, 4)
    assert isinstance(Bottleneck(256, 256, 1).shortcut, torch.nn.Identity)
    # dense layers keep what they read
    x = torch.randn(2, 6, 4, 4)
    before, y = x.clone(), DenseLayer(6, 5)(x)
    assert y.shape == (2, 11, 4, 4) and torch.equal(y[:, :6], before) and torch.equal(x, before)
    # squeeze and excitation scales channels
    x = torch.randn(2, 32, 4, 4)
    factors = SqueezeExcitation(32)(x) / x
    assert torch.allclose(factors, factors[:, :, :1, :1].expand_as(x), atol=1e-4)
    assert ((factors > 0) & (factors < 1)).all() and factors[0].std() > 0
    # pre-activation blocks pass their input on untouched
    residual, x = PreActivationBlock(16, 16, 1), torch.randn(2, 16, 4, 4)
    last, before = residual.body[3], x.clone()
    assert isinstance(last, torch.nn.Conv2d)
    torch.nn.init.zeros_(last.weight)
    assert torch.equal(residual(x), before)


def small(vocabulary: int = 6, pre_norm: bool = False, seed: int = 0) -> Transformer:
    """An untrained model whose logits are spread, so that no two targets have nearly the same score."""
    torch.manual_seed(seed)
    model = Transformer(vocabulary, width=16, heads=2, hidden=32, layers=2, pre_norm=pre_norm, max_length=20)
    with torch.no_grad():
        model.embedding.weight.mul_(3)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def test_the_encoding_of_positions() -> None:
    encoding = sinusoids(50, 8)
    assert encoding.shape == (50, 8)
    for position, column in ((0, 0), (7, 3), (49, 6)):
        angle = position / 10_000 ** (2 * (column // 2) / 8)
        assert encoding[position, column] == pytest.approx((math.cos if column % 2 else math.sin)(angle), abs=1e-6)


def translated(pre_norm: bool) -> tuple[Transformer, Tensor, Tensor]:
    """A small Transformer with its inputs: source sentences and target sentences."""
    model = small(9, pre_norm)
    return model, torch.randint(4, 9, (3, 5)), torch.randint(4, 9, (3, 6))


PRE_NORM = pytest.mark.parametrize("pre_norm", [False, True])


@PRE_NORM
def test_later_tokens_do_not_change_earlier_logits(pre_norm: bool) -> None:
    model, source, target = translated(pre_norm)
    before = model(source, target)
    for position in range(1, 6):
        changed = torch.cat([target[:, :position], torch.randint(4, 9, (3, 6 - position))], 1)
        assert torch.allclose(model(source, changed)[:, :position], before[:, :position], atol=1e-6)
    changed = target.clone()
    changed[:, 2] = (changed[:, 2] - 3) % 5 + 4  # another token
    assert ((model(source, changed) - before)[:, 2:].abs().amax(2) > 1e-4).all()


@PRE_NORM
def test_padding_does_not_change_logits(pre_norm: bool) -> None:
    model, source, target = translated(pre_norm)
    more = torch.cat([target, torch.zeros(3, 2, dtype=torch.int64)], 1)
    found = model(torch.cat([source, torch.zeros(3, 3, dtype=torch.int64)], 1), more)
    assert torch.allclose(found[:, :6], model(source, target), atol=1e-5) and found.isfinite().all()
    other = torch.cat([source, torch.full((3, 3), 5)], 1)
    assert not torch.allclose(model(other, more)[:, :6], found[:, :6], atol=1e-2)


@PRE_NORM
def test_one_token_at_a_time_gives_the_logits_of_all_at_once(pre_norm: bool) -> None:
    model, source, target = translated(pre_norm)
    source[1, 3:] = 0
    state = model.encode(source)
    steps = [model.next_logits(target[:, [position]], state) for position in range(6)]
    assert torch.allclose(torch.cat(steps, 1), model(source, target), atol=1e-5) and state.length == 6


@PRE_NORM
def test_every_parameter_gets_a_gradient(pre_norm: bool) -> None:
    model, source, target = translated(pre_norm)
    source[1, 3:] = 0
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
@pytest.mark.parametrize("max_length", [1, 3])
def test_beam_search_finds_what_a_search_of_all_targets_finds(length_penalty: float, max_length: int) -> None:
    """With as many beams as there are targets. The vocabulary has 3 tokens beside the end."""
    targets = [(*words, END) for n in range(max_length) for words in itertools.product([1, 4, 5], repeat=n)]
    lengths = set()
    for seed in range(4):
        model, source = small(seed=seed), torch.randint(4, 6, (3, 5))
        source[1, 2:] = 0
        options: Any = {"max_length": max_length, "length_penalty": length_penalty, **ENDS}
        for sentence, result in zip(source, beam_search(model, source, beams=9, **options), strict=True):
            weights = {target: ((5 + len(target)) / 6) ** -length_penalty for target in targets}
            scores = {target: weights[target] * log_probability(model, sentence, target) for target in targets}
            assert scores[(*result, END)] == pytest.approx(max(scores.values()), abs=1e-5)
            lengths.add(len(result))
    assert len(lengths) > 1 or max_length == 1


class ByLength:
    """In place of a model: fixed probabilities of (1, END) at each length, or a list of them with one per row."""

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


def test_the_search_goes_on_only_while_a_longer_target_may_be_better() -> None:
    """The target that ends at once has the probability 0.6; the one of two tokens 0.4, with a larger score."""
    model: Any = ByLength((0.4, 0.6), (0.0, 1.0))
    for penalty, expected in ((0.6, [[]]), (5.0, [[1]])):
        found = beam_search(model, torch.tensor([[5]]), length_penalty=penalty, max_length=2, beams=1, **ENDS)
        assert found == expected
    assert math.log(0.4) / (7 / 6) ** 5 > math.log(0.6) > math.log(0.4) / (7 / 6) ** 0.6
    # The second sentence has a target of probability 1. The first has reached its limit, 1, or no target of 2
    # tokens can be better than its best one: 3 could, but are too many for it.
    source = torch.tensor([[5], [5]])
    cases: Any = [((0.9, 0.1), [1, 5], 5.0, [[1], []]), ((0.4, 0.6), [2, 3], 3.0, [[], []])]
    for first, limits, length_penalty, with_the_larger_limit in cases:
        for given, calls, expected in ((limits, 1, [[], []]), (limits[1], 2, with_the_larger_limit)):
            model = ByLength([first, (0.0, 1.0)], *[(0.0, 1.0)] * 4)
            found = beam_search(model, source, max_length=given, beams=1, length_penalty=length_penalty, **ENDS)
            assert (model.length, found) == (calls, expected)


SEARCHES = pytest.mark.parametrize("search", [greedy, beam_search])


@SEARCHES
def test_every_sentence_has_its_own_limit(search: Any) -> None:
    limits, lengths = [1, 9, 4, 2, 7], set()
    for seed in range(5):
        model, source = small(9, seed=seed), torch.randint(4, 9, (5, 6))
        options = ENDS | ({"length_penalty": 2.0} if search is beam_search else {})
        pairs = zip(source, limits, strict=True)
        alone = [search(model, sentence[None], max_length=limit, **options)[0] for sentence, limit in pairs]
        for given in (limits, torch.tensor(limits)):
            assert search(model, source, max_length=given, **options) == alone
        assert search(model, source[:0], max_length=[], **options) == []
        lengths |= set(map(len, alone))
    assert len(lengths) > 2


@SEARCHES
def test_a_batch_is_translated_as_its_sentences_are(search: Any) -> None:
    model, source = small(9, seed=5), torch.randint(4, 9, (5, 6))
    for row, length in enumerate((6, 1, 4, 2, 5)):
        source[row, length:] = 0
    options = {"max_length": 8, **ENDS}
    alone = [search(model, sentence[sentence != 0][None], **options)[0] for sentence in source]
    assert search(model, source, **options) == alone and search(model, source[:0], **options) == []


@SEARCHES
def test_no_token_is_beyond_the_vocabulary(search: Any) -> None:
    options, chosen = {"max_length": 8, **ENDS}, set()
    for seed in range(4):
        model, source = small(9, seed=seed), torch.randint(4, 6, (5, 6))
        chosen |= set(sum(search(model, source, **options), []))
        found = search(model, source, vocabulary=6, **options)
        assert any(found) and max(sum(found, [])) < 6
    assert max(chosen) >= 6


def test_greedy_takes_the_most_probable_token_each_time() -> None:
    model, source = small(9, seed=2), torch.randint(4, 9, (4, 5))
    for sentence, result in zip(source, greedy(model, source, max_length=7, **ENDS), strict=True):
        tokens: list[int] = []
        while len(tokens) < 7 and tokens[-1:] != [END]:
            logits = model(sentence[None], torch.tensor([[BEGIN, *tokens]]))[0, -1].detach()
            logits[[0, BEGIN]] = -torch.inf
            tokens.append(int(logits.argmax()))
        assert result == [token for token in tokens if token != END]


def test_impossible_arguments_are_refused() -> None:
    refuse("width is 20; it must be a multiple of 2 \\* heads, 8", Transformer, 8, width=20, heads=4)
    for name, value in (("layers", 0), ("dropout", 1.0), ("padding", 8)):
        refuse(f"{name} is {value}", Transformer, 8, **{name: value})
    model, source = small(), torch.tensor([[4, 5]])
    for name, value in (("beams", 0), ("length_penalty", -1.0)):
        refuse(f"{name} is {value}", beam_search, model, source, max_length=3, **ENDS, **{name: value})
    refuse("a sentence has 21 tokens; max_length of the model is 20", model.encode, torch.full((1, 21), 4))


def written(folder: Path, **splits: Any) -> Path:
    """The folder, after the files of these splits were written, or the files of the usual ones."""
    folder.mkdir(exist_ok=True)
    for split, pairs in (splits or {"train": TRAIN * 5, "test": TEST}).items():
        for language, side in zip(("de", "en"), zip(*pairs, strict=True), strict=True):
            (folder / f"{split}.{language}").write_text("".join(f"{text}\n" for text in side), encoding="utf-8")
    return folder


def read(folder: Path, vocabulary_size: int = 32, **options: Any) -> ParallelText:
    return ParallelText(str(folder), "de", "en", vocabulary_size, character_coverage=1.0, **options)


def test_items_are_the_lines_of_both_files(tmp_path: Path) -> None:
    data = read(written(tmp_path))
    assert set(data) == {"train", "test"} and len(data.vocabulary) == 32
    for split, pairs in (("train", TRAIN * 5), ("test", TEST)):
        assert len(data[split]) == len(pairs)
        for index, pair in enumerate(pairs):
            source, target = data[split][index]
            assert source.dtype == target.dtype == torch.int64
            assert source[-1] == target[-1] == END and target[0] == BEGIN and BEGIN not in source
            texts = data.vocabulary.decode([source[:-1].tolist(), target[1:-1].tolist()])
            assert [text.replace("\u2028", " ") for text in pair] == texts
            assert data[split].lengths[index] == max(len(source), len(target) - 1)
    assert data.texts("test") == tuple(map(list, zip(*TEST, strict=True)))


def test_the_text_is_encoded_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(folder := written(tmp_path))
    monkeypatch.setattr("dgc_datasets.translation.parallel_text.train_vocabulary", Mock(side_effect=TypeError))
    (cache,) = folder.glob("tokens-*")
    cache.chmod(0o555)
    again = read(folder)
    assert again.fingerprint == first.fingerprint
    for index in range(len(TRAIN)):
        assert all(map(torch.equal, first["train"][index], again["train"][index]))
    monkeypatch.undo()
    written(folder, test=[*TEST, ("das Haus", "the house")])
    assert len(read(folder)["test"]) == 3 and len(list(folder.glob("tokens-*"))) == 2
    assert read(folder, vocabulary_size=30).fingerprint != first.fingerprint
    assert not list(folder.glob(".writing-*"))
    text = [side for pair in TRAIN for side in pair]
    assert train_vocabulary(text, 30, 1.0) == train_vocabulary(iter(text), 30, 1.0)
    # an interrupted preparation leaves no cache
    new = written(folder / "new")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("dgc_datasets.translation.sentences.np.save", Mock(side_effect=KeyboardInterrupt))
        read(new)
    assert [path.name for path in new.iterdir() if path.is_dir()] == [] and len(read(new)["test"]) == 2


def test_empty_or_long_pairs_are_left_out(tmp_path: Path) -> None:
    folder = written(written(tmp_path), train=[*TRAIN, ("", "nothing"), ("Haus " * 40, "house")])
    warning = r"train\.de: 2 of the 6 training pairs \(33\.3 %\) are left out, .*dataset\.max_length, 30; raise it"
    with pytest.warns(UserWarning, match=warning):
        data = read(folder, max_length=30)
    assert len(data["train"]) == 4 and data["train"].pairs_left_out == 2


@pytest.mark.parametrize("left_out", [1, 2])
def test_more_than_a_percent_of_pairs_left_out_is_a_warning(left_out: int, tmp_path: Path) -> None:
    pairs = [*TRAIN * 25, ("", "nothing")][left_out - 1 :] + [("", "x")] * (left_out - 1)
    folder = written(written(tmp_path), train=pairs)
    with pytest.warns(UserWarning) if left_out == 2 else nullcontext():  # of 101 pairs
        assert read(folder, max_length=30)["train"].pairs_left_out == left_out


DAMAGED: list[tuple[str, bytes | None, str]] = [
    ("test.en", None, "the data set is not there: .*test.en is missing"),
    ("val.en", b"a\n", "val.de is missing"),
    ("train.en", b"a\n", "train.de has 20 lines, .*train.en has 1"),
    ("train.en", b"\xff\n" * 20, "train.en is not UTF-8"),
    ("test.de", b"Haus " * 300 + b"\na\n", "line 1: the pair has"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED)
def test_a_file_that_does_not_fit_is_refused(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    folder = written(tmp_path)
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    refuse(message, read, folder)


def test_a_size_that_the_text_does_not_allow_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path)
    refuse("vocabulary_size is 5000, which is not possible with this text: .*<= ", read, folder, 5000)
    refuse("vocabulary_size is 1; it must be at least 2", read, folder, 1)
    refuse("no sentence of at most 2 tokens", read, folder, max_length=2)
    refuse("not a sentencepiece model", Vocabulary, b"nothing")
    refuse("max_tokens is 8, fewer than the 9 tokens", TokenBatches, np.array([3, 9]), 8)


def test_number_words(tmp_path: Path) -> None:
    given: Any = {"train_numbers": 200, "test_numbers": 50, "vocabulary_size": 60}
    data = NumberWords(str(tmp_path), **given)
    german, english = data.texts("test")
    assert len(german) == len(set(german)) == 50 and not set(german) & set(data.texts("train")[0])
    assert all(" " not in word for word in german) and len(data["train"]) == 200
    pairs = dict(zip(*map(sum, zip(*(data.texts(s) for s in data), strict=True), ([], [])), strict=True))
    assert pairs.get("sieben", "seven") == "seven" and len(pairs) == 250
    assert data.vocabulary.decode(data.vocabulary.encode(german)) == german
    before = {file: os.stat(file).st_mtime_ns for file in tmp_path.rglob("*.*")}
    assert NumberWords(str(tmp_path), **given).fingerprint == data.fingerprint
    assert before == {file: os.stat(file).st_mtime_ns for file in tmp_path.rglob("*.*")}
    numbers = draw_numbers(20_000, seed=0)
    assert len(set(numbers)) == 20_000 and numbers == draw_numbers(20_000, 0) != draw_numbers(20_000, 1)
    digits = np.bincount([len(str(number)) for number in numbers], minlength=7)
    # All of up to 3 digits occur. The uniform half has 9 % of 5 digits, the other half about a third.
    assert digits[1] == 10 and digits[2] == 90 and digits[3] > 800 and 0.15 < digits[5] / 20_000 < 0.3
    assert max(numbers) < 10**6 and abs(np.mean([n > 5 * 10**5 for n in numbers[:5000]]) - 0.4) < 0.1
    new = str(tmp_path / "refused")
    refuse("dataset.source is 'xx'; num2words knows", NumberWords, new, source="xx")
    refuse("both 'en'", NumberWords, new, source="en")
    refuse("test_numbers is 0", NumberWords, new, test_numbers=0)
    refuse("it must be at most 500000", NumberWords, new, train_numbers=10**6)
    assert not (tmp_path / "refused").exists()


def test_each_pair_is_in_one_batch_of_at_most_max_tokens_with_padding_at_the_ends() -> None:
    first, second = ([5, END], [BEGIN, 6, 7, END]), ([END], [BEGIN])
    source, target = collate([tuple(map(torch.tensor, pair)) for pair in (first, second)])
    assert source.tolist() == [[5, END], [END, PADDING]]
    assert target.tolist() == [[BEGIN, 6, 7, END], [BEGIN, PADDING, PADDING, PADDING]]
    lengths = np.random.default_rng(0).integers(1, 40, 500)
    batches = TokenBatches(lengths, 400)
    orders = [batches.epoch(seed) for seed in (0, 1)]
    for order in orders:
        assert len(order) == len(batches)
        assert sorted(index for batch in order for index in batch) == list(range(500))
        assert max(len(batch) * lengths[batch].max() for batch in order) <= 400
    assert orders[0] == batches.epoch(0) and orders[0] != orders[1]
    assert {frozenset(batch) for batch in orders[0]} != {frozenset(batch) for batch in orders[1]}
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in orders[0])
    assert padded < 1.05 * lengths.sum(), "batches are of sentences of about equal length"
    assert padded > 0.8 * 400 * len(batches), "batches are full"


def test_the_preparation_of_wmt16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, english, german in (
        ("a", ["a  house", "", "one"], ["ein Haus", "x", "ein sehr langer Satz"]),
        ("b", ["the\u2028dog"], ["der Hund"]),
    ):
        (tmp_path / f"{name}.en").write_text("".join(f"{text}\n" for text in english), encoding="utf-8")
        (tmp_path / f"{name}.de").write_text("".join(f"{text}\r\n" for text in german), encoding="utf-8")
    sgml = '<srcset setid="x"><doc>\n<p>\n<seg id="1">{}</seg>\n<SEG id="2">{}</SEG>\n</p></doc></srcset>\n'
    (tmp_path / "news-src.en.sgm").write_text(sgml.format("black &amp; white", "one"), encoding="utf-8")
    (tmp_path / "news-ref.de.sgm").write_text(sgml.format("schwarz &amp; weiß", ""), encoding="utf-8")
    root = tmp_path / "data" / "wmt16"
    words = ["--train", f"{tmp_path}/a", f"{tmp_path}/b", "--test", f"{tmp_path}/news", "--root", str(root)]
    main(words)
    assert capsys.readouterr().out == "train: 2 of 4 pairs\ntest: 2 of 2 pairs\n"
    texts = {file.name: file.read_text(encoding="utf-8") for file in root.iterdir()}
    train = {"train.en": "a house\nthe dog\n", "train.de": "ein Haus\nder Hund\n"}
    assert texts == {**train, "test.en": "black & white\none\n", "test.de": "schwarz & weiß\n\n"}
    for name, text in (("src.de", "falsch"), ("ref.en", "wrong")):  # as the official set of 2014 has them
        (tmp_path / f"news-deen-{name}.sgm").write_text(sgml.format(text, text), encoding="utf-8")
    for name in ("src.en", "ref.de"):
        (tmp_path / f"news-{name}.sgm").rename(tmp_path / f"news-deen-{name}.sgm")
    expected = {("en", "de"): ("one\n", texts["test.de"]), ("de", "en"): ("wrong\n", "falsch\nfalsch\n")}
    for (source, target), (english_end, german_text) in expected.items():
        new = tmp_path / f"{source}-{target}"
        main([*words[:-1], str(new), "--source", source, "--target", target])
        assert (new / "test.en").read_text(encoding="utf-8").endswith(english_end)
        assert (new / "test.de").read_text(encoding="utf-8") == german_text

    def refused(message: str, *more: str) -> None:
        with pytest.raises(SystemExit, match="^1$"):
            main([*words, *more])
        assert message in capsys.readouterr().err

    other = ("--root", f"{tmp_path}/new")
    refused("exists already")
    refused("there is none", *other, "--val", "c")
    (tmp_path / "news-fren-src.en.sgm").write_text(sgml.format("x", "x"), encoding="utf-8")
    refused("news-deen-src.en.sgm, ", *other)
    (tmp_path / "news-fren-src.en.sgm").unlink()
    (tmp_path / "b.de").write_text("x\ny\n")
    refused("b.en and", *other)
    assert not (tmp_path / "new").exists()
