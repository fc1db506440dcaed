"""Sentence pairs from text files, one sentence per line, line n of one file translated in line n of the other.

    ROOT/train.en  ROOT/train.de     ROOT/test.en  ROOT/test.de     and ROOT/val.en  ROOT/val.de, if they exist

One process per machine trains the vocabulary on the training text and encodes all files, in the folder
ROOT/tokens-DIGEST. The digest is of the settings and of the files' sizes and dates, so changed text is encoded
anew. Vocabularies are equal on all machines that have the same text and version of sentencepiece.
"""

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dgc_datasets.prepare import prepare_folder
from dgc_datasets.translation.sentences import Sentences
from dgc_datasets.translation.vocabulary import BEGIN, END, Vocabulary, train_vocabulary

SPLITS = ("train", "val", "test")
# The vocabulary is trained on this many lines, evenly spread over longer text.
VOCABULARY_LINES = 2_000_000
ENCODED_AT_ONCE = 100_000
VOCABULARY_FILE = "vocabulary.model"
# Some long or empty lines are in every corpus. More of them than this share are worth a look.
USUALLY_LEFT_OUT = 0.01


class SentencePairs(Dataset[tuple[Tensor, Tensor]]):
    """Items: (source int64 [tokens], target int64 [tokens]). Both end with END; the target begins with BEGIN.

    Attributes:
        lengths: int64 [pairs], tokens of the longer sentence of each pair, with one of BEGIN and END.
        target_tokens: int64 [pairs], tokens of each target with its END.
        pairs_left_out: training pairs with an empty or too long sentence, which are not items.
    """

    def __init__(self, source: Sentences, target: Sentences, chosen: np.ndarray) -> None:
        self.source = source
        self.target = target
        self.chosen = chosen
        self.lengths = np.maximum(source.lengths(), target.lengths())[chosen] + 1
        self.target_tokens = target.lengths()[chosen] + 1
        self.pairs_left_out = len(source) - len(chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = int(self.chosen[index])
        source = np.concatenate([self.source[number], [END]])
        target = np.concatenate([[BEGIN], self.target[number], [END]])
        return torch.from_numpy(source.astype(np.int64)), torch.from_numpy(target.astype(np.int64))


class ParallelText(dict[str, SentencePairs]):
    """{'train', 'test'}, and 'val' if there are files of it.

    Args:
        root: the folder of the text files.
        source: the ending of the source files.
        target: the ending of the target files.
        vocabulary_size: tokens of the vocabulary, which both languages share.
        max_length: the most tokens of a sentence, END included. Longer training pairs are left out, with a
            warning if they and the empty ones are more than 1 % of all.
        character_coverage: share of the text whose characters are in the vocabulary. Rare others are unknown.

    Attributes:
        vocabulary: the `Vocabulary`.
        fingerprint: a short hash of the vocabulary, equal on ranks that have the same.

    Raises:
        ValueError: with a remedy, if files are missing or do not fit together, or if a sentence to evaluate on is
            too long.
    """

    def __init__(
        self,
        root: str = "data/wmt16",
        source: str = "en",
        target: str = "de",
        vocabulary_size: int = 32_000,
        max_length: int = 256,
        character_coverage: float = 0.9995,
    ) -> None:
        if source == target:
            raise ValueError(f"dataset.source and dataset.target are both {source!r}; they name two languages")
        for name, value in (("vocabulary_size", vocabulary_size), ("max_length", max_length)):
            if value < 2:
                raise ValueError(f"dataset.{name} is {value}; it must be at least 2")
        if not 0 < character_coverage <= 1:
            raise ValueError(
                f"dataset.character_coverage is {character_coverage}; it must be above 0 and at most 1"
            )
        folder = Path(root).expanduser()
        languages = (source, target)
        files = find_files(folder, languages)
        encoded = folder / f"tokens-{digest(files, vocabulary_size, character_coverage)}"
        prepare_folder(encoded, partial(encode_files, files, languages, vocabulary_size, character_coverage))
        model = (encoded / VOCABULARY_FILE).read_bytes()
        self.vocabulary = Vocabulary(model)
        self.fingerprint = hashlib.sha256(model).hexdigest()[:16]
        self._files = files
        for split in files:
            first, second = (Sentences.load(encoded / f"{split}.{language}") for language in languages)
            chosen = np.arange(len(first))
            longest = np.maximum(first.lengths(), second.lengths()) + 1
            if split == "train":
                shortest = np.minimum(first.lengths(), second.lengths())
                chosen = chosen[(shortest > 0) & (longest <= max_length)]
            elif (too_long := np.flatnonzero(longest > max_length)).size:
                line = int(too_long[0])
                raise ValueError(
                    f"{files[split][0]}, line {line + 1}: the pair has {longest[line]} tokens, more than "
                    f"dataset.max_length, {max_length}. Raise it, or take the line out of both files"
                )
            if not len(chosen):
                raise ValueError(
                    f"{files[split][0]} has no sentence of at most {max_length} tokens; raise dataset.max_length"
                )
            self[split] = pairs = SentencePairs(first, second, chosen)
            share = pairs.pairs_left_out / len(first)
            if share > USUALLY_LEFT_OUT:
                warnings.warn(
                    f"{files[split][0]}: {pairs.pairs_left_out} of the {len(first)} training pairs "
                    f"({100 * share:.1f} %) are left out, since a sentence is empty or has more tokens than "
                    f"dataset.max_length, {max_length}; raise it, or correct the files.",
                    stacklevel=2,
                )

    def texts(self, split: str) -> tuple[list[str], list[str]]:
        """The lines of the source file and of the target file of a split, not of the items of 'train'."""
        source, target = (list(lines(file)) for file in self._files[split])
        return source, target


def find_files(folder: Path, languages: Sequence[str]) -> dict[str, list[Path]]:
    """{split: [source file, target file]} of those that exist. 'train' and 'test' must."""
    files = {split: [folder / f"{split}.{language}" for language in languages] for split in SPLITS}
    for split, pair in files.items():
        missing = [file for file in pair if not file.is_file()]
        if missing and (split != "val" or len(missing) == 1):
            raise ValueError(
                f"the data set is not there: {missing[0]} is missing. Put text files train.{languages[0]}, "
                f"train.{languages[1]}, test.{languages[0]} and test.{languages[1]} into {folder}, one sentence "
                "per line, or name another folder with --configs.dataset.root DIR"
            )
    return {split: pair for split, pair in files.items() if pair[0].is_file()}


def digest(files: dict[str, list[Path]], *settings: float) -> str:
    """A short hash of everything that the encoded files depend on."""
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for pair in files.values() for file in pair]
    return hashlib.sha256(repr((settings, facts)).encode()).hexdigest()[:12]


def lines(file: Path) -> Iterator[str]:
    """The lines of a UTF-8 file. Only \\n ends a line: the Unicode separators occur within sentences."""
    with open(file, encoding="utf-8", newline="\n") as content:
        try:
            for line in content:
                yield line.rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def count_pairs(source: Path, target: Path) -> int:
    """The number of lines of both files. Raises ValueError if it differs or is 0."""
    first, second = (sum(1 for _ in lines(file)) for file in (source, target))
    if first != second:
        raise ValueError(f"{source} has {first} lines, {target} has {second}; line n must translate line n")
    if first == 0:
        raise ValueError(f"{source} and {target} are empty")
    return first


def encode_files(
    files: dict[str, list[Path]], languages: Sequence[str], vocabulary_size: int, coverage: float, place: Path
) -> None:
    """Writes the vocabulary and the tokens of every file into `place`."""
    counts = {split: count_pairs(*pair) for split, pair in files.items()}
    stride = -(-2 * counts["train"] // VOCABULARY_LINES)
    text = (line for file in files["train"] for line in islice(lines(file), 0, None, stride))
    model = train_vocabulary(text, vocabulary_size, coverage)
    (place / VOCABULARY_FILE).write_bytes(model)
    vocabulary = Vocabulary(model)
    for split, pair in files.items():
        for language, file in zip(languages, pair, strict=True):
            Sentences.of(map(vocabulary.encode, chunks(lines(file)))).save(place / f"{split}.{language}")


def chunks(items: Iterator[str], size: int = ENCODED_AT_ONCE) -> Iterator[list[str]]:
    """Lists of `size` items; the last one may be shorter."""
    while chunk := list(islice(items, size)):
        yield chunk


def collate(pairs: Sequence[Any], padding: int = 0) -> tuple[Tensor, Tensor]:
    """(source [pairs, longest source], target [pairs, longest target]), padded at the ends."""
    sources, targets = zip(*pairs, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(list(sources), True, padding), pad(list(targets), True, padding)
