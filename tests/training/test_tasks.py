"""Language modelling and translation: data, batches, models, meters, evaluation, and short runs of train.py."""

import math
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch
from refusals import refuse
from sacrebleu.metrics.bleu import BLEU
from simulated import events_of, rewound, summary_of, train_in
from states import assert_equal
from training.test_runs import LSTM as SETTINGS
from training.test_runs import write_wikitext

from dgc.comm.lockstep import LockstepWorld
from dgc_datasets import Digits, PythonSources, WikiText2
from dgc_datasets.python_sources import is_held_out
from dgc_datasets.translation import PADDING, NumberWords, collate
from dgc_models import GPT, LSTM
from dgc_models.decoding import greedy
from dgc_models.transformer import Transformer
from dgc_training.config import ConfigError, instantiate, load
from dgc_training.config_files import REPOSITORY
from dgc_training.meters import BitsPerToken, Perplexity, TokenLoss
from dgc_training.schedule import warmup_cosine
from dgc_training.stepping import Stepping
from dgc_training.tasks.protocol import Setup
from dgc_training.tasks.tokens import IGNORED, EvaluationRows, TokenStreams, Windows
from dgc_training.tasks.translation import Translation
from dgc_training.tasks.translation_batches import TranslationBatches, evaluation_batches
from dgc_training.tasks.translation_evaluation import TranslationEvaluation, TranslationQuality, table

CPU, TINY = torch.device("cpu"), ["configs/numwords/tiny.py"]


def test_texts(tmp_path: Path) -> None:
    sources = PythonSources(vocabulary_size=64, characters=40_000)
    train = sources["train"]
    assert (len(train), len(sources["test"])) == (40_000, 2_000)
    assert train.dtype == torch.int64 and 0 <= int(train.min()) <= int(train.max()) == 63
    counts = train.bincount(minlength=64)[1:].tolist()
    assert counts == sorted(counts, reverse=True) and torch.equal(train, PythonSources(64, 40_000)["train"])
    assert 150 < sum(is_held_out(f"package/module{n}.py") for n in range(4000)) < 250
    data = WikiText2(str(write_wikitext(tmp_path / "data")))
    assert {split: len(tokens) for split, tokens in data.items()} == {"train": 1000, "val": 76, "test": 30}
    first = data["train"][:10].tolist()
    assert first[0] == first[4] == 1 and first[7] == 0 and len(set(first)) == 9
    assert data["val"][70:75].tolist() == [0] * 5 and int(data["val"][75]) == first[9]
    refuse(r"dataset\.vocabulary_size is 1; it must be at least", PythonSources, vocabulary_size=1)
    refuse(r"dataset\.characters is 5; it must be at least", PythonSources, characters=5)
    refuse(r"wiki\.train\.tokens, .* not found in .*put the three files", WikiText2, str(tmp_path))


TOKENS = torch.arange(1000)


def steps_of_streams(passes: int, rank: int, epochs: Any, start: int = 0, per_epoch: int | None = None) -> Any:
    streams = TokenStreams(TOKENS, 5, 3, passes, rank=rank, size=2, device=CPU, steps_per_epoch=per_epoch)
    return [chunk for e in epochs for _, step in streams.epoch(e, start) for chunk in step]


@pytest.mark.parametrize("passes", [1, 2])
def test_streams_are_contiguous(passes: int) -> None:
    rows = []
    for rank in range(2):
        chunks = steps_of_streams(passes, rank, [0])
        assert [chunk.begins for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
        inputs, targets = (torch.cat([chunk[i] for chunk in chunks], dim=1) for i in (0, 1))
        assert torch.equal(targets, inputs + 1) and bool((inputs.diff(dim=1) == 1).all())
        rows += inputs[:, 0].tolist()
        assert 160 <= inputs.size(1) + 5 * passes and inputs.size(1) <= 166
    assert rows == [166 * n for n in range(6)]


@pytest.mark.parametrize("passes", [1, 2])
def test_short_epochs_of_streams_go_on_in_the_text(passes: int) -> None:
    whole = steps_of_streams(passes, 1, [0, 1])
    short = steps_of_streams(passes, 1, range(9), per_epoch=5)
    assert_equal(short[: len(whole)], whole[: len(short)])


@pytest.mark.parametrize("passes", [1, 2])
def test_streams_resume_at_any_step(passes: int) -> None:
    resumed, whole = steps_of_streams(passes, 0, [1], 3), steps_of_streams(passes, 0, [1])
    assert torch.equal(resumed[0].inputs, whole[3 * passes].inputs)


def test_streams_of_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1000 tokens, too few for one step of 2 ranks x 3 rows"):
        TokenStreams(TOKENS, 500, 3, rank=0, size=2, device=CPU)


def test_a_state_goes_on_only_where_the_text_does() -> None:
    """A rank of an asynchronous run takes 7, 13 and 10 steps of epochs of 10. The text has 33 steps."""
    for passes in (1, 2):
        one: Any = {"rank": 0, "size": 1, "device": CPU, "steps_per_epoch": 10}
        batches = TokenStreams(torch.arange(167 * passes), 5, 1, passes, **one)
        assert batches.steps == 33
        begins: list[Any] = []
        before: Any = None
        for epoch, taken in enumerate((7, 13, 10, 10)):
            for step, chunks in batches.epoch(epoch, more_steps=partial(next, iter([True] * taken), False)):
                for chunk in chunks:
                    follows = before is not None and torch.equal(chunk.inputs[:, :1], before.targets[:, -1:])
                    assert chunk.begins is not follows
                    begins += [(epoch, step)] * chunk.begins
                    before = chunk
        assert begins == [(0, 0), (1, 0), (2, 0), (3, 3)]
        # a checkpoint has the state of its chunk
        for last, begins_anew in ((None, False), (14 * passes - 1, False), (16 * passes - 1, True)):
            resumed = TokenStreams(torch.arange(500), 5, 1, passes, **one)
            resumed.last = last
            found = [chunk.begins for _, chunks in resumed.epoch(1, 4) for chunk in chunks]
            assert found == [begins_anew] + [False] * (6 * passes - 1)


def test_every_token_but_the_first_is_evaluated_once() -> None:
    for count, size in product((0, 1, 2, 33, 100), (1, 3, 8)):
        seen: Counter[int] = Counter()
        for rank in range(size):
            for inputs, targets, _ in EvaluationRows(torch.arange(count), 4, 5, rank=rank, size=size, device=CPU):
                kept = targets != IGNORED
                assert torch.equal(targets[kept], inputs[kept] + 1)
                seen.update(targets[kept].tolist())
        assert seen == Counter(range(1, count))
    windows = Windows(torch.arange(101), 10)
    items = [windows[n] for n in range(len(windows))]
    assert torch.equal(torch.cat([targets for _, targets in items]), torch.arange(1, 101))
    assert all(torch.equal(targets, inputs + 1) for inputs, targets in items)


@pytest.fixture
def tokens_of_11() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(11, (2, 8))


def test_an_lstm_continues_from_its_state(tokens_of_11: torch.Tensor) -> None:
    lstm = LSTM(11, width=6, layers=2, dropout=0.0)
    whole, _ = lstm(tokens_of_11)
    first, state = lstm(tokens_of_11[:, :5])
    second, _ = lstm(tokens_of_11[:, 5:], state)
    assert torch.allclose(whole, torch.cat([first, second], dim=1), atol=1e-6)


def test_a_decoder_is_causal(tokens_of_11: torch.Tensor) -> None:
    gpt, changed = GPT(11, context=8, width=8, layers=2, heads=2), tokens_of_11.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    assert torch.allclose(gpt(tokens_of_11)[:, :5], gpt(changed)[:, :5], atol=1e-6)
    assert not torch.allclose(gpt(tokens_of_11)[:, 5:], gpt(changed)[:, 5:], atol=1e-3)


def test_a_decoder_takes_fewer_tokens_than_its_context(tokens_of_11: torch.Tensor) -> None:
    gpt = GPT(11, context=8, width=8, layers=2, heads=2)
    assert gpt(tokens_of_11[:, :3]).shape == (2, 3, 11)


def test_sizes_of_a_language_model_that_cannot_be_are_refused() -> None:
    refuse("width 10 cannot be divided into 4 heads", GPT, 11, width=10, heads=4)
    refuse("dropout must be", GPT, 11, dropout=1.0)
    refuse("dropout must be", LSTM, 11, dropout=-0.1)
    refuse("vocabulary_size must be at least 1", GPT, 0)
    refuse("layers must be at", LSTM, 11, layers=0)


def test_meters_of_uniform_predictions() -> None:
    for meter, expected in ((TokenLoss(), math.log(8)), (Perplexity(), 8.0), (BitsPerToken(), 3.0)):
        assert math.isnan(meter.compute()) and meter.lower_is_better
        meter.update(torch.zeros(5, 8), torch.tensor([0, 7, IGNORED, 3, IGNORED]))
        assert meter.data()["num_tokens"] == 3 and meter.compute() == pytest.approx(expected)
        meter.set({"num_tokens": 6, "total": 2 * meter.data()["total"]})
        assert meter.compute() == pytest.approx(expected)
    huge = Perplexity()
    huge.set({"num_tokens": 1, "total": 1e6})
    assert huge.compute() == math.inf


def test_the_rate_follows_a_cosine_after_the_warm_up() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler, rates = warmup_cosine(optimizer, warmup_steps=4, total_steps=24, final=0.1), []
    for _ in range(26):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0]) and rates[14] == pytest.approx(1.1)
    assert rates[24:] == pytest.approx([0.2, 0.2])
    refuse("warmup_steps is 5; it must be from 0 to total_steps - 1, 4", warmup_cosine, optimizer, 5, 5)


def test_with_dgc_gradients_are_clipped_before_compression() -> None:
    settings = load(["configs/wikitext/lstm.py", "configs/dgc/wm5.py"]).train
    assert settings.clip_norm is None and settings.compression.memory.gradient_clipping.max_norm == 0.4


@pytest.mark.usefixtures("no_type_checks")
def test_a_gpt_run_learns_on_any_number_of_ranks(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    settings = "train.num_epochs=3 train.batch_size=8 train.optimizer.lr=0.01 data.num_threads_per_worker=1 "
    settings += "dataset.characters=20000 dataset.vocabulary_size=64 task.context=8 task.steps_per_epoch=10 "
    settings += "model.heads=2 model.width=16"
    for size in (1, 2):
        train_in(tmp_path / str(size), ["configs/pysource/gpt.py"], settings.split(), size)
        summary = summary_of(tmp_path / str(size))
        best = summary["best"]
        assert best["bits_per_character/test"] == pytest.approx(best["loss/test"] / math.log(2))
        # a guess has 6 bits, and lower is better
        assert best["bits_per_character/test"] < 5.5
        assert best["bits_per_character/test"] <= summary["final"]["bits_per_character/test"]
        assert (summary["best_epoch"] == 3) == (best == summary["final"])
        assert summary["tokens"] == 30 * 8 * 8 * size and "samples" not in summary
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.usefixtures("no_type_checks")
def test_an_epoch_goes_on_at_the_same_step(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    stack = ["configs/wikitext/lstm.py"]
    settings = [word.replace("ROOT", str(write_wikitext(tmp_path / "data"))) for word in SETTINGS]
    settings.append("train.checkpoint_every=3")
    train_in(tmp_path / "run", stack, settings)
    summary = summary_of(tmp_path / "run")
    assert summary["tokens"] == 2 * 5 * 2 * 4 * 8
    assert summary["best"]["perplexity/val"] == pytest.approx(math.exp(summary["best"]["loss/val"]))
    for size, start, steps in ((1, "e0001s00003", 2), (3, "e0001s00003", 2), (3, "e0001", 5)):
        again, taken = rewound(tmp_path / "run", tmp_path / f"{start} {size}", start), Mock(wraps=Stepping.step)
        monkeypatch.setattr(Stepping, "step", lambda stepping, taken=taken: taken(stepping))
        with pytest.warns(UserWarning, match=f"was saved by 2 ranks and is resumed by {size}"):
            train_in(again, stack, settings, size)
        assert taken.call_count == size * steps and summary_of(again)["epochs"] == 2
        monkeypatch.undo()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> NumberWords:
    folder = str(tmp_path_factory.mktemp("numbers"))
    return NumberWords(folder, train_numbers=300, test_numbers=37, vocabulary_size=60)


def batches(data: NumberWords, rank: int, size: int, passes: int = 1) -> TranslationBatches:
    return TranslationBatches(data["train"], 200, passes, rank=rank, size=size, seed=7, device=CPU)


@pytest.mark.parametrize(("size", "passes"), [(1, 1), (3, 1), (2, 3)])
def test_each_pair_is_seen_once_up_to_the_last_batches(data: NumberWords, size: int, passes: int) -> None:
    ranks = [batches(data, rank, size, passes) for rank in range(size)]
    total, steps = len(ranks[0].batches), ranks[0].steps_per_epoch
    assert steps == total // (size * passes)
    left_out = []
    for epoch in (0, 1):
        seen: list[Any] = []
        for own in ranks:
            found = list(own.epoch(epoch))
            assert [(step, len(batches)) for step, batches in found] == [(step, passes) for step in range(steps)]
            targets = [row for _, step in found for batch in step for row in batch.target]
            seen += [tuple(row[row != PADDING].tolist()) for row in targets]
        assert len(seen) == len(set(seen)), "no pair twice"
        chosen = ranks[0].order(epoch)[: steps * size * passes]
        assert len(seen) == sum(map(len, chosen))
        tokens = sum(len(target) - 1 for target in seen)  # without BEGIN, which is not predicted
        assert tokens == sum(batch.tokens for _, step in found for batch in step)
        left_out.append({index for batch in ranks[0].order(epoch)[len(chosen) :] for index in batch})
    assert left_out[0] != left_out[1] or total == len(chosen)


def test_a_run_resumes_at_any_step(data: NumberWords) -> None:
    own = batches(data, 1, 2)
    whole, steps = list(own.epoch(3)), own.steps_per_epoch
    for start in (0, 1, steps - 1):
        assert_equal(list(batches(data, 1, 2).epoch(3, start)), whole[start:])


def test_a_rank_may_take_more_steps_in_another_order(data: NumberWords) -> None:
    steps = batches(data, 1, 2).steps_per_epoch
    left = iter([True] * 2 * steps)
    found = list(batches(data, 0, 2).epoch(0, more_steps=lambda: next(left, False)))
    assert [step for step, _ in found] == list(range(2 * steps))
    with pytest.raises(AssertionError):
        assert_equal([step for _, step in found[:steps]], [step for _, step in found[steps:]])


def test_sums_over_ranks_give_the_bleu_of_all_sentences() -> None:
    references = ["one hundred and two", "seven", "ninety-nine thousand, four", "eleven", "two hundred and six"]
    translations = ["one hundred and two", "eleven", "ninety-five thousand, four", "", "two hundred and six"]
    parts = [TranslationQuality() for _ in range(3)]
    for rank, part in enumerate(parts[:2]):  # the third counts nothing
        part.update(translations[rank::2], references[rank::2])
    parts[0].set({key: sum(part.data()[key] for part in parts) for key in parts[0].data()})
    results = parts[0].results()
    assert results["exact_match"] == 40.0
    for name, tokenizer in (("bleu", "13a"), ("char_bleu", "char")):
        expected = BLEU(tokenize=tokenizer).corpus_score(translations, [references]).score
        assert results[name] == pytest.approx(expected)
    assert all(value != value for value in parts[2].results().values()), "NaN if nothing was counted"
    # It is smoothed as sacrebleu does by default: no four words match, and in the second pair no three.
    references = ["one hundred and two thousand", "seven hundred and eleven"]
    few, fewer = ["one hundred and ten thousand", "seven hundred or nine"], ["two one", "one and and eleven"]
    for translations in (few, fewer):
        quality = TranslationQuality()
        quality.update(translations, references)
        score = BLEU(force=True).corpus_score(translations, [references])
        assert score.counts[3] == 0 and score.score > 0
        assert quality.results()["bleu"] == pytest.approx(score.score)


def model(data: NumberWords, extra: int = 0, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(len(data.vocabulary) + extra, width=16, heads=2, hidden=16, layers=1, padding=PADDING)


def evaluate(data: NumberWords, size: int, **options: Any) -> tuple[dict[str, float], dict[str, str]]:
    def run(transport: Any) -> Any:
        evaluation, own = TranslationEvaluation(data, transport, CPU, max_tokens=80, **options), model(data)
        results = evaluation(own)
        assert own.training and list(results) == evaluation.names
        return results, evaluation.texts

    found = LockstepWorld(size).run(run)
    assert all(other == found[0] for other in found)
    return found[0]


def test_each_sentence_counts_once_over_uneven_shares(data: NumberWords) -> None:
    for size in (1, 3, 40):
        shares = [evaluation_batches(data["test"], 100, rank=rank, size=size) for rank in range(size)]
        assert sorted(index for share in shares for batch in share for index in batch) == list(range(37))
    assert [] in shares, "40 ranks, 37 pairs"
    results, texts = evaluate(data, 1)
    own, references = model(data).eval(), data.texts("test")[1]
    source, target = collate([data["test"][index] for index in range(37)])
    limits = 2 * (source != PADDING).sum(1) + 10
    expected = data.vocabulary.decode(greedy(own, source, begin=2, end=3, max_length=limits))
    exact = sum(a == b for a, b in zip(expected, references, strict=True)) / 37
    assert results["translation/test_exact_match"] == pytest.approx(100 * exact)
    loss = torch.nn.CrossEntropyLoss(ignore_index=PADDING)
    nll = loss(own(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
    assert results["translation/test_nll"] == pytest.approx(nll.item(), rel=1e-5)
    for size in (2, 3):
        other, other_texts = evaluate(data, size)
        assert other["translation/test_nll"] == pytest.approx(results["translation/test_nll"], rel=1e-6)
        assert other.keys() == results.keys() and len(other_texts["translations/test"].splitlines()) == 2 + 8
        rows = [text["translations/test"].splitlines() for text in (texts, other_texts)]
        assert [row.split(" | ")[:2] for row in rows[0]] == [row.split(" | ")[:2] for row in rows[1]]


@pytest.mark.parametrize("beams", [1, 2])
def test_translations_do_not_depend_on_the_other_sentences_of_a_batch(data: NumberWords, beams: int) -> None:
    """An end is improbable here, and longer targets are preferred: the limits of length decide."""
    options: Any = {"max_tokens": 80, "beams": beams, "length_penalty": 3.0}
    evaluation = TranslationEvaluation(data, LockstepWorld(1).transports[0], CPU, **options)
    order = data["test"].lengths.argsort()
    short, long = ([data["test"][int(index)] for index in part] for part in (order[:5], order[-5:]))
    seen: set[int] = set()
    for seed in range(3):
        own = model(data, seed=seed).eval()
        with torch.no_grad():
            own.embedding.weight.mul_(3)
        together = evaluation._translate(own, collate([*short, *long])[0])
        assert evaluation._translate(own, collate(short)[0]) == together[:5]
        assert [evaluation._translate(own, collate([pair])[0])[0] for pair in short] == together[:5]
        limits = [2 * len(source) + 10 for source, _ in short]
        seen |= {limit - len(found) for limit, found in zip(limits, together[:5], strict=True)}
        assert min(seen) >= 0
    assert min(seen) <= 1, "some targets are as long as their limits"
    own.max_length = max(map(len, together)) - 1
    assert max(map(len, evaluation._translate(own, collate(long)[0]))) <= own.max_length


def test_a_larger_vocabulary_of_the_model_does_not_reach_the_translations(data: NumberWords) -> None:
    """A vocabulary rounded up has tokens without a text. They are the most probable ones here."""
    own = model(data, extra=2)
    with torch.no_grad():
        own.embedding.weight[-2:] = torch.randn(16) * torch.tensor([[9.0], [-9.0]])
    for beams in (1, 2):
        evaluation = TranslationEvaluation(data, LockstepWorld(1).transports[0], CPU, max_tokens=80, beams=beams)
        assert evaluation(own).keys() == set(evaluation.names)
        found = evaluation._translate(own.eval(), collate([data["test"][0]])[0])
        assert max(found[0], default=0) < len(data.vocabulary)
    # beam search is used and shown
    assert evaluate(data, 1, beams=3)[1] != evaluate(data, 1)[1]
    # and a table's cells may have bars
    assert table([("a|b", "c", "d")]).splitlines()[-1] == "| a\\|b | c | d |"


@pytest.mark.usefixtures("no_type_checks")
def test_two_ranks_learn_to_translate(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    words = f"dataset.root={tmp_path / 'numbers'} dataset.train_numbers=1500 dataset.test_numbers=51"
    words += " train.num_epochs=1 train.batch_size=64 train.optimizer.lr=0.0025 data.num_threads_per_worker=1"
    train_in(tmp_path / "run", TINY, words.split())
    summary = summary_of(tmp_path / "run")
    assert summary["best"]["translation/test_exact_match"] > 5 and summary["best"]["translation/test_bleu"] > 40
    data = NumberWords(str(tmp_path / "numbers"), train_numbers=1500, test_numbers=51)
    own = TranslationBatches(data["train"], 64, rank=0, size=2, seed=42, device=CPU)
    expected = sum(2 * (batch.tokens // 2) for _, step in own.epoch(0) for batch in step)
    assert summary["tokens"] == expected and "tokens/s" in capsys.readouterr().out
    events = events_of(tmp_path / "run")
    assert {"translation/test_nll", "time/tokens_per_second"} <= set(events.Tags()["scalars"])
    texts = [event.tensor_proto.string_val[0] for event in events.Tensors("translations/test/text_summary")]
    assert len(texts) == 1 and all(b"| source | reference | translation |" in text for text in texts)


def test_a_rank_with_another_vocabulary_is_named(data: NumberWords) -> None:
    def with_own_vocabulary(transport: Any) -> None:
        mine = NumberWords.__new__(NumberWords)
        mine.update(data)
        mine.fingerprint = f"of rank {transport.rank}"
        with pytest.raises(ConfigError, match="rank 1 has another vocabulary than rank 0"):
            TranslationEvaluation(mine, transport, CPU, max_tokens=80)

    LockstepWorld(2).run(with_own_vocabulary)


def test_data_of_another_task_is_refused() -> None:
    setup = Setup(load(TINY), Digits(), torch.nn.Linear(2, 2), LockstepWorld(1).transports[0], CPU)
    refuse("task is Translation, but dataset is a Digits", Translation, setup)


@pytest.mark.parametrize(("names", "said"), [(["test"], "'test'"), ([], "none")])
def test_data_without_a_split_to_train_on_is_refused(data: NumberWords, names: list[str], said: str) -> None:
    words = f"dataset has no split 'train', on which the model is trained. Its splits: {said}$"
    splits, transport = {name: data[name] for name in names}, LockstepWorld(1).transports[0]
    refuse(words, Setup, load(TINY), splits, torch.nn.Linear(2, 2), transport, CPU)


def test_too_little_data_is_refused(data: NumberWords) -> None:
    refuse("too few for one step of 50 ranks x 2 passes", batches, data, 0, 50, 2)


@pytest.mark.parametrize(("metric", "lower"), [("nll", True), ("bleu", False)])
def test_a_lower_likelihood_is_no_better_checkpoint(data: NumberWords, metric: str, lower: bool) -> None:
    tree = load(TINY, [f"--configs.train.metric=translation/test_{metric}"])
    setup = Setup(tree, data, model(data), LockstepWorld(1).transports[0], CPU)
    assert Translation(setup).lower_is_better is lower


@pytest.mark.parametrize("name", ["numwords/tiny", "numwords/transformer", "wmt16/base", "wmt16/big"])
def test_a_model_has_the_documented_size(name: str) -> None:
    page = (REPOSITORY / "docs/language.md").read_text().splitlines()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in instantiate(load([f"configs/{name}"]).model).parameters())
    (row,) = (line for line in page if f"`configs/{name}`" in line)
    assert f"{parameters:,}" in row
    assert f"{parameters:,} parameters" in (REPOSITORY / f"configs/{name}.py").read_text()


@pytest.mark.parametrize(("files", "passes"), [(["big"], 1), (["base", "tokens400k"], 16)])
def test_wmt16_has_the_published_settings(files: list[str], passes: int) -> None:
    settings = load([f"configs/wmt16/{name}" for name in files]).train
    assert settings.metric == "translation/val_bleu", "the test split chooses no checkpoint"
    assert (settings.num_batches_per_step, settings.batch_size) == (passes, 3500)
    assert settings.optimizer.lr * 8 * passes == pytest.approx(5e-4)
    assert (list(settings.optimizer.betas), settings.criterion.label_smoothing) == ([0.9, 0.98], 0.1)
    assert (settings.scheduler.warmup_steps, settings.schedule_lr_per_epoch) == (4000, False)
