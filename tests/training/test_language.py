"""Language modelling: data, batches, models, meters, and runs of train.py on simulated ranks."""

import json
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from dgc.comm.lockstep import LockstepWorld
from dgc_datasets import PythonSources, WikiText2
from dgc_datasets.python_sources import is_held_out
from dgc_models import GPT, LSTM
from dgc_training.checkpoint.reading import read_tensors
from dgc_training.config import ConfigError, load
from dgc_training.meters import BitsPerToken, Perplexity, TokenLoss
from dgc_training.schedule import warmup_cosine
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.setup import require_complete
from dgc_training.stepping import Stepping
from dgc_training.tasks.tokens import IGNORED, EvaluationRows, TokenStreams, Windows

CPU = torch.device("cpu")
TINY = [
    "train.num_epochs=2",
    "train.batch_size=4",
    "train.checkpoint_every=2",
    "train.check_replicas_every=2",
    "data.num_threads_per_worker=1",
    "dataset.root=ROOT",
    "dataset.vocabulary_size=20",
    "task.context=8",
    "task.steps_per_epoch=5",
    "model.width=16",
]
SMALL_LSTM = ["model.layers=2", "model.dropout=0.0"]

pytestmark = pytest.mark.usefixtures("no_type_checks")


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wikitext")
    line = " the old man and the sea met <unk> again \n"
    (folder / "wiki.train.tokens").write_text(line * 100)
    (folder / "wiki.valid.tokens").write_text(line * 7 + " a word of its own \n")
    (folder / "wiki.test.tokens").write_text(line * 3)
    return folder


def run(root: Path, directory: Path, words: Any = (), size: int = 2, stack: Any = (), options: Any = ()) -> None:
    stack = stack or ["configs/wikitext/lstm.py"]
    small = SMALL_LSTM if any("lstm" in name for name in stack) else []
    settings = [f"--configs.{word.replace('ROOT', str(root))}" for word in [*TINY, *small, *words]]
    argv = ["--configs", *stack, "--devices", "cpu", "--run-dir", str(directory), *options, *settings]
    args, overrides = parse_arguments(argv)
    tree = load(args.configs, overrides)
    require_complete(tree, "cpu")
    LockstepWorld(size).run(lambda transport: train.run(args, tree, transport))


# Data


def test_python_sources() -> None:
    data = PythonSources(vocabulary_size=64, characters=40_000)
    assert (len(data["train"]), len(data["test"])) == (40_000, 2_000)
    assert data["train"].dtype == torch.int64 and 0 <= int(data["train"].min()) <= int(data["train"].max()) == 63
    counts = data["train"].bincount(minlength=64)[1:].tolist()
    assert counts == sorted(counts, reverse=True)
    assert torch.equal(data["train"], PythonSources(64, 40_000)["train"])
    held_out = sum(is_held_out(f"package/module{n}.py") for n in range(4000))
    assert 150 < held_out < 250
    for arguments in ({"vocabulary_size": 1}, {"characters": 5}):
        with pytest.raises(ValueError, match=r"dataset\.\w+ is \d; it must be at least"):
            PythonSources(**arguments)


def test_wikitext(wikitext: Path, tmp_path: Path) -> None:
    data = WikiText2(str(wikitext))
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
        batches = TokenStreams(
            torch.arange(167 * passes), 5, 1, passes, rank=0, size=1, device=CPU, steps_per_epoch=10
        )
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
            resumed = TokenStreams(torch.arange(500), 5, 1, passes, rank=0, size=1, device=CPU, steps_per_epoch=10)
            resumed.last = last
            found = [chunk.begins for _, chunks in resumed.epoch(1, 4) for chunk in chunks]
            assert found == [begins_anew] + [False] * (6 * passes - 1)


def test_windows_cover_the_stream_once() -> None:
    windows = Windows(torch.arange(101), 10)
    items = [windows[n] for n in range(len(windows))]
    assert torch.equal(torch.cat([targets for _, targets in items]), torch.arange(1, 101))
    assert all(torch.equal(targets, inputs + 1) for inputs, targets in items)


@pytest.mark.parametrize("count", [0, 1, 2, 33, 100])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_token_but_the_first_is_evaluated_once(count: int, size: int) -> None:
    tokens = torch.arange(count)
    seen: Counter[int] = Counter()
    for rank in range(size):
        for inputs, targets, _ in EvaluationRows(tokens, 4, 5, rank=rank, size=size, device=CPU):
            kept = targets != IGNORED
            assert torch.equal(targets[kept], inputs[kept] + 1)
            seen.update(targets[kept].tolist())
    assert seen == Counter(range(1, count))


# Models, meters, schedule


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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: GPT(11, width=10, heads=4), "width 10 cannot be divided into 4 heads"),
        (lambda: GPT(11, dropout=1.0), "dropout must be"),
        (lambda: GPT(0), "vocabulary_size must be at least 1"),
        (lambda: LSTM(11, layers=0), "layers must be at least 1"),
        (lambda: LSTM(11, dropout=-0.1), "dropout must be"),
    ],
)
def test_sizes_of_models(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model()


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


def test_warmup_then_cosine() -> None:
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


# Runs


@pytest.mark.parametrize(
    ("compression", "size", "words"),
    [
        ([], 2, ["model.dropout=0.2"]),
        ([], 1, ["train.precision=bf16"]),
        (["configs/dgc/wm5.py"], 2, []),
        (["configs/powersgd/rank1.py"], 2, []),
    ],
)
def test_an_lstm_run_resumed_in_mid_epoch_ends_bit_identical(
    compression: Any, size: int, words: Any, wikitext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It resumes with the LSTM's state, in the middle of a row."""
    stack = ["configs/wikitext/lstm.py", *compression]
    run(wikitext, tmp_path / "whole", words, size, stack)
    stop, steps = train.is_due, 0

    def fail(every: Any, step: Any) -> bool:
        nonlocal steps
        steps += 1
        if steps > 16 * size:  # in the fourth step of the second epoch: every rank asks twice a step
            raise RuntimeError("killed")
        return stop(every, step)

    with monkeypatch.context() as patched:
        patched.setattr(train, "is_due", fail)
        with pytest.raises(RuntimeError, match="killed"):
            run(wikitext, tmp_path / "cut", words, size, stack)
    saved = json.loads((tmp_path / "cut" / "checkpoints" / "latest.json").read_text())["checkpoint"]
    assert saved.startswith("e0001") and saved != "e0001"
    is_bf16 = "train.precision=bf16" in words and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    task = read_tensors(tmp_path / "cut" / "checkpoints" / saved / f"rank{size - 1}.pt")["task"]
    state = task["state"]
    assert task["chunk"] == 5 + int(saved[-5:]) - 1, "five steps of the first epoch, and those of the second"
    assert [part.shape for part in state] == [(2, 4, 16)] * 2 and bool(state[0].any())
    assert state[0].dtype == (torch.bfloat16 if is_bf16 else torch.float32)
    chunks, make = [], TokenStreams._chunk

    def recorded(self: TokenStreams, number: int) -> Any:
        chunks.append((self.last, number))
        return make(self, number)

    with monkeypatch.context() as patched:
        patched.setattr(TokenStreams, "_chunk", recorded)
        run(wikitext, tmp_path / "cut", words, size, stack)
    assert chunks[0] == (task["chunk"], task["chunk"] + 1)
    for name in ("shared.pt", *(f"rank{rank}.pt" for rank in range(size))):
        whole, cut = (read_tensors(tmp_path / d / "checkpoints" / "e0002" / name) for d in ("whole", "cut"))
        for part in ("model", "task"):
            a, b = (torch.utils._pytree.tree_leaves(saved.get(part, {})) for saved in (whole, cut))
            assert len(a) == len(b) and all(map(torch.equal, map(torch.as_tensor, a), map(torch.as_tensor, b)))
    summaries = [json.loads((tmp_path / d / "summary.json").read_text()) for d in ("whole", "cut")]
    assert summaries[0]["best"] == summaries[1]["best"] and summaries[0]["tokens"] == 2 * 5 * size * 4 * 8
    assert summaries[0]["best"]["perplexity/val"] == pytest.approx(math.exp(summaries[0]["best"]["loss/val"]))


def test_a_gpt_run_learns_on_any_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.num_epochs=3", "dataset.characters=20000", "dataset.vocabulary_size=64", "train.batch_size=8"]
    words += ["model.heads=2", "task.steps_per_epoch=10", "train.optimizer.lr=0.01", "dataset.root=null"]
    settings = [f"--configs.{word}" for word in [*TINY, *words] if "dataset.root" not in word]
    for size in (1, 2):
        directory = tmp_path / str(size)
        argv = ["--configs", "configs/pysource/gpt.py", "--devices", "cpu", "--run-dir", str(directory), *settings]
        args, overrides = parse_arguments(argv)
        tree = load(args.configs, overrides)
        LockstepWorld(size).run(partial(train.run, args, tree))
        summary = json.loads((directory / "summary.json").read_text())
        best = summary["best"]
        assert best["bits_per_character/test"] == pytest.approx(best["loss/test"] / math.log(2))
        # a guess has 6 bits, and lower is better
        assert best["bits_per_character/test"] < 5.5
        assert best["bits_per_character/test"] <= summary["final"]["bits_per_character/test"]
        assert (summary["best_epoch"] == 3) == (best == summary["final"])
        assert summary["tokens"] == 30 * 8 * 8 * size and "samples" not in summary
    assert "tokens/s" in capsys.readouterr().out


def test_a_run_resumes_on_another_number_of_ranks(wikitext: Path, tmp_path: Path) -> None:
    run(wikitext, tmp_path / "run", ["train.num_epochs=1"])
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("num_epochs: 1", "num_epochs: 2"))
    with pytest.warns(UserWarning, match="was saved by 2 ranks and is resumed by 3"):
        run(wikitext, tmp_path / "run", size=3)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epochs"] == 2


@pytest.mark.parametrize("size", [1, 3])
def test_an_epoch_of_a_fixed_number_of_steps_goes_on_at_the_same_step(
    size: int, wikitext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(wikitext, tmp_path / "run")
    (tmp_path / "run/checkpoints/latest.json").write_text(json.dumps({"checkpoint": "e0001s00002"}))
    taken: list[int] = []
    step = Stepping.step

    def counted(stepping: Stepping) -> None:
        taken.append(stepping.optimizer.transport.rank)
        step(stepping)

    monkeypatch.setattr(Stepping, "step", counted)
    with pytest.warns(UserWarning, match=f"was saved by 2 ranks and is resumed by {size}"):
        run(wikitext, tmp_path / "run", size=size)
    assert taken.count(0) == 3


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.vocabulary_size=5", "the model's vocabulary has 5: set model.vocabulary_size"),
        ("task.context=0", "task.context is 0; it must be at least 1"),
        ("task.context=400", "too few for one step of 2 ranks x 4 rows"),
        ("train.clip_norm=0.0", "train.clip_norm is 0.0; it must be positive"),
        ("train.precision=fp8", "train.precision is 'fp8'; it must be one of fp32, bf16, fp16"),
        ("train.precision=fp16", "train.precision is fp16, which needs a GPU, and the device is cpu: use bf16"),
        ("train.metric=perplexity/dev", "is not a result; there are: perplexity/val, loss/val"),
        ("dataset.root=/nowhere", "put the three files"),
    ],
)
def test_what_does_not_fit_is_one_error(word: str, message: str, wikitext: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(wikitext, tmp_path / "run", [word])
    assert not (tmp_path / "run").exists()


def test_dgc_clips_before_compression(wikitext: Path, tmp_path: Path) -> None:
    stack = ["configs/wikitext/lstm.py", "configs/dgc/wm5.py"]
    settings = load(stack).train
    assert settings.clip_norm is None and settings.compression.memory.gradient_clipping.max_norm == 0.4
    with pytest.raises(ConfigError, match=r"train\.clip_norm limits averages"):
        run(wikitext, tmp_path / "run", ["train.clip_norm=1.0"], stack=stack)
