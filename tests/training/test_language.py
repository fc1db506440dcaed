"""Language modelling: data, batches, models, meters, and runs of train.py on simulated ranks."""

import math
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch
from simulated import rewound, summary_of, train_in
from training.test_resuming import LSTM as SETTINGS
from training.test_resuming import write_wikitext

from dgc_datasets import PythonSources, WikiText2
from dgc_datasets.python_sources import is_held_out
from dgc_models import GPT, LSTM
from dgc_training.config import load
from dgc_training.meters import BitsPerToken, Perplexity, TokenLoss
from dgc_training.schedule import warmup_cosine
from dgc_training.stepping import Stepping
from dgc_training.tasks.tokens import IGNORED, EvaluationRows, TokenStreams, Windows

CPU = torch.device("cpu")


def test_texts(tmp_path: Path) -> None:
    sources = PythonSources(vocabulary_size=64, characters=40_000)
    train = sources["train"]
    assert (len(train), len(sources["test"])) == (40_000, 2_000)
    assert train.dtype == torch.int64 and 0 <= int(train.min()) <= int(train.max()) == 63
    counts = train.bincount(minlength=64)[1:].tolist()
    assert counts == sorted(counts, reverse=True) and torch.equal(train, PythonSources(64, 40_000)["train"])
    assert 150 < sum(is_held_out(f"package/module{n}.py") for n in range(4000)) < 250
    for arguments in ({"vocabulary_size": 1}, {"characters": 5}):
        with pytest.raises(ValueError, match=r"dataset\.\w+ is \d; it must be at least"):
            PythonSources(**arguments)

    data = WikiText2(str(write_wikitext(tmp_path / "data")))
    assert {split: len(tokens) for split, tokens in data.items()} == {"train": 1000, "val": 76, "test": 30}
    first = data["train"][:10].tolist()
    assert first[0] == first[4] == 1 and first[7] == 0 and len(set(first)) == 9
    assert data["val"][70:75].tolist() == [0] * 5 and int(data["val"][75]) == first[9]
    with pytest.raises(ValueError, match=r"wiki\.train\.tokens, .* not found in .*put the three files"):
        WikiText2(str(tmp_path))


@pytest.mark.parametrize("passes", [1, 2])
def test_streams_are_contiguous_and_resume_anywhere(passes: int) -> None:
    tokens = torch.arange(1000)

    def steps(rank: int, epochs: Any, start: int = 0, per_epoch: int | None = None) -> Any:
        batches = TokenStreams(tokens, 5, 3, passes, rank=rank, size=2, device=CPU, steps_per_epoch=per_epoch)
        return [chunk for e in epochs for _, step in batches.epoch(e, start) for chunk in step]

    rows = []
    for rank in range(2):
        chunks = steps(rank, [0])
        assert [chunk.begins for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
        inputs, targets = (torch.cat([chunk[i] for chunk in chunks], dim=1) for i in (0, 1))
        assert torch.equal(targets, inputs + 1) and bool((inputs.diff(dim=1) == 1).all())
        rows += inputs[:, 0].tolist()
        assert 160 <= inputs.size(1) + 5 * passes and inputs.size(1) <= 166
    assert rows == [166 * n for n in range(6)]
    whole = steps(1, [0, 1])
    short = steps(1, range(9), per_epoch=5)
    for a, b in zip(whole, short, strict=False):
        assert torch.equal(a.inputs, b.inputs) and a.begins == b.begins
    assert torch.equal(steps(0, [1], 3)[0].inputs, steps(0, [1])[3 * passes].inputs)
    with pytest.raises(ValueError, match=r"1000 tokens, too few for one step of 2 ranks x 3 rows"):
        TokenStreams(tokens, 500, 3, rank=0, size=2, device=CPU)


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
        # the state of a checkpoint is that of its chunk
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


def test_a_state_continues_and_a_decoder_is_causal() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(11, (2, 8))
    lstm = LSTM(11, width=6, layers=2, dropout=0.0)
    whole, _ = lstm(tokens)
    first, state = lstm(tokens[:, :5])
    second, _ = lstm(tokens[:, 5:], state)
    assert torch.allclose(whole, torch.cat([first, second], dim=1), atol=1e-6)
    gpt = GPT(11, context=8, width=8, layers=2, heads=2)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    assert torch.allclose(gpt(tokens)[:, :5], gpt(changed)[:, :5], atol=1e-6)
    assert not torch.allclose(gpt(tokens)[:, 5:], gpt(changed)[:, 5:], atol=1e-3)
    assert gpt(tokens[:, :3]).shape == (2, 3, 11)
    model: Any
    for model, vocabulary, arguments, message in (
        (GPT, 11, {"width": 10, "heads": 4}, "width 10 cannot be divided into 4 heads"),
        (GPT, 11, {"dropout": 1.0}, "dropout must be"),
        (GPT, 0, {}, "vocabulary_size must be at least 1"),
        (LSTM, 11, {"layers": 0}, "layers must be at least 1"),
        (LSTM, 11, {"dropout": -0.1}, "dropout must be"),
    ):
        with pytest.raises(ValueError, match=message):
            model(vocabulary, **arguments)


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


def test_warmup_then_cosine_and_clipping() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = warmup_cosine(optimizer, warmup_steps=4, total_steps=24, final=0.1)
    rates = []
    for _ in range(26):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0]) and rates[14] == pytest.approx(1.1)
    assert rates[24:] == pytest.approx([0.2, 0.2])
    with pytest.raises(ValueError, match="warmup_steps is 5; it must be from 0 to total_steps - 1, 4"):
        warmup_cosine(optimizer, 5, 5)
    # with DGC, gradients are clipped before compression
    settings = load(["configs/wikitext/lstm.py", "configs/dgc/wm5.py"]).train
    assert settings.clip_norm is None and settings.compression.memory.gradient_clipping.max_norm == 0.4


@pytest.mark.usefixtures("no_type_checks")
def test_a_gpt_run_learns_on_any_number_of_ranks(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    settings = "train.num_epochs=3 train.batch_size=8 train.optimizer.lr=0.01 data.num_threads_per_worker=1 "
    settings += "dataset.characters=20000 dataset.vocabulary_size=64 task.context=8 task.steps_per_epoch=10 "
    settings += "model.heads=2 model.width=16"
    for size in (1, 2):
        directory = tmp_path / str(size)
        train_in(directory, ["configs/pysource/gpt.py"], settings.split(), size)
        summary = summary_of(directory)
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
    """On fewer and on more ranks."""
    stack = ["configs/wikitext/lstm.py"]
    settings = [word.replace("ROOT", str(write_wikitext(tmp_path / "data"))) for word in SETTINGS]
    settings.append("train.checkpoint_every=3")
    train_in(tmp_path / "run", stack, settings)
    summary = summary_of(tmp_path / "run")
    assert summary["tokens"] == 2 * 5 * 2 * 4 * 8
    assert summary["best"]["perplexity/val"] == pytest.approx(math.exp(summary["best"]["loss/val"]))
    taken: list[int] = []
    step = Stepping.step

    def counted(stepping: Stepping) -> None:
        taken.append(stepping.optimizer.transport.rank)
        step(stepping)

    monkeypatch.setattr(Stepping, "step", counted)
    for size, start, steps in ((1, "e0001s00003", 2), (3, "e0001s00003", 2), (3, "e0001", 5)):
        taken.clear()
        again = rewound(tmp_path / "run", tmp_path / f"{start} {size}", start)
        with pytest.warns(UserWarning, match=f"was saved by 2 ranks and is resumed by {size}"):
            train_in(again, stack, settings, size)
        assert taken.count(0) == steps and summary_of(again)["epochs"] == 2
