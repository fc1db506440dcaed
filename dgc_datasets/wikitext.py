"""WikiText-2 (Merity et al. 2016, arXiv 1609.07843) from its three plain files. Nothing is downloaded."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

FILES = {"train": "wiki.train.tokens", "val": "wiki.valid.tokens", "test": "wiki.test.tokens"}
UNKNOWN, END_OF_LINE = "<unk>", "<eos>"


def words_of(path: Path) -> Iterator[str]:
    """The words of a file; each line ends in <eos>."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield from line.split()
            yield END_OF_LINE


class WikiText2(dict[str, Tensor]):
    """{'train', 'val', 'test'}: word ids, int64 [n]. Id 0 is <unk>, also for words outside of the vocabulary.

    Args:
        root: folder of wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens.
        vocabulary_size: number of ids: <unk> and the most frequent words of the training data. All of WikiText-2
            has 33,278.

    Raises:
        ValueError: if a file is missing or empty, or `vocabulary_size` is less than 2.

    Example:
        tokens = WikiText2("data/wikitext-2")["train"]
    """

    def __init__(self, root: str = "data/wikitext-2", vocabulary_size: int = 33278) -> None:
        if vocabulary_size < 2:
            raise ValueError(f"dataset.vocabulary_size is {vocabulary_size}; it must be at least 2")
        folder = Path(root)
        missing = [name for name in FILES.values() if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} not found in {folder.absolute()}: put the three files of WikiText-2 (word "
                f"level, {', '.join(FILES.values())}) there, or set dataset.root to their folder"
            )
        counts = Counter(words_of(folder / FILES["train"]))
        counts.pop(UNKNOWN, None)
        # Equal counts keep the order of first appearance, so that the same file gives the same ids.
        ids = {word: n for n, (word, _) in enumerate(counts.most_common(vocabulary_size - 1), start=1)}
        splits = {
            split: torch.tensor([ids.get(word, 0) for word in words_of(folder / name)], dtype=torch.int64)
            for split, name in FILES.items()
        }
        if empty := [FILES[split] for split, tokens in splits.items() if not len(tokens)]:
            raise ValueError(f"{', '.join(empty)} in {folder.absolute()} is empty: put the complete file there")
        super().__init__(splits)
