"""Parallel text: its files, its vocabulary, its cache; number words; batches of equally many tokens."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from refusals import refuse

from dgc_datasets.translation import BEGIN, END, PADDING, NumberWords, ParallelText, TokenBatches, Vocabulary
from dgc_datasets.translation.number_words import draw_numbers
from dgc_datasets.translation.parallel_text import collate
from dgc_datasets.translation.vocabulary import train_vocabulary
from dgc_datasets.translation.wmt16 import main

TRAIN = [("ein Haus", "a house"), ("ein Hund", "a dog"), ("das Haus", "the house"), ("der Hund", "the dog")]
TEST = [("das Hundehaus", "the doghouse"), ("ein\u2028Haus", "a house")]


def write(folder: Path, split: str, pairs: Any) -> None:
    folder.mkdir(exist_ok=True)
    for language, side in zip(("de", "en"), zip(*pairs, strict=True), strict=True):
        (folder / f"{split}.{language}").write_text("".join(f"{text}\n" for text in side), encoding="utf-8")


def written(folder: Path) -> Path:
    write(folder, "train", TRAIN * 5)
    write(folder, "test", TEST)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path)


def read(folder: Path, vocabulary_size: int = 32, **options: Any) -> ParallelText:
    return ParallelText(str(folder), "de", "en", vocabulary_size, character_coverage=1.0, **options)


def test_items_are_the_lines_of_both_files(folder: Path) -> None:
    data = read(folder)
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


def test_the_text_is_encoded_once_until_it_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(folder)
    monkeypatch.setattr("dgc_datasets.translation.parallel_text.train_vocabulary", Mock(side_effect=TypeError))
    (cache,) = folder.glob("tokens-*")
    cache.chmod(0o555)
    again = read(folder)
    assert again.fingerprint == first.fingerprint
    for index in range(len(TRAIN)):
        assert all(map(torch.equal, first["train"][index], again["train"][index]))
    monkeypatch.undo()
    write(folder, "test", [*TEST, ("das Haus", "the house")])
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


def test_empty_and_long_pairs_are_left_out_and_files_that_do_not_fit_are_refused(folder: Path) -> None:
    write(folder, "train", [*TRAIN, ("", "nothing"), ("Haus " * 40, "house")])
    warning = r"train\.de: 2 of the 6 training pairs \(33\.3 %\) are left out, .*dataset\.max_length, 30; raise it"
    with pytest.warns(UserWarning, match=warning):
        data = read(folder, max_length=30)
    assert len(data["train"]) == 4 and data["train"].pairs_left_out == 2
    for left_out in (1, 2):  # of 101 pairs: up to 1 % is usual
        write(folder, "train", [*TRAIN * 25, ("", "nothing")][left_out - 1 :] + [("", "x")] * (left_out - 1))
        with pytest.warns(UserWarning) if left_out == 2 else nullcontext():
            assert read(folder, max_length=30)["train"].pairs_left_out == left_out
    cases: list[tuple[str, bytes | None, str]] = [
        ("test.en", None, "the data set is not there: .*test.en is missing"),
        ("val.en", b"a\n", "val.de is missing"),
        ("train.en", b"a\n", "train.de has 20 lines, .*train.en has 1"),
        ("train.en", b"\xff\n" * 20, "train.en is not UTF-8"),
        ("test.de", b"Haus " * 300 + b"\na\n", "line 1: the pair has"),
    ]
    for number, (name, content, message) in enumerate(cases):
        damaged = written(folder / str(number))
        (damaged / name).unlink() if content is None else (damaged / name).write_bytes(content)
        refuse(message, read, damaged)
    message = "vocabulary_size is 5000, which is not possible with this text: .*<= "
    refuse(message, read, folder, vocabulary_size=5000)
    refuse("vocabulary_size is 1; it must be at least 2", read, folder, vocabulary_size=1)
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
    for name, english, german in (("a", ["a  house", "", "one"], ["ein Haus", "x", "ein sehr langer Satz"]),
                                  ("b", ["the\u2028dog"], ["der Hund"])):  # fmt: skip
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
    for direction, expected in ((("en", "de"), "one\n"), (("de", "en"), "wrong\n")):
        new = tmp_path / "-".join(direction)
        source, target = direction
        main([*words[:-1], str(new), "--source", source, "--target", target])
        assert (new / "test.en").read_text(encoding="utf-8").endswith(expected)
    assert (tmp_path / "en-de" / "test.de").read_text(encoding="utf-8") == texts["test.de"]
    assert (tmp_path / "de-en" / "test.de").read_text(encoding="utf-8") == "falsch\nfalsch\n"

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
