"""Numbers in words, in two languages: a translation task without a download, for tests and demonstrations.

    einhundertdreiundzwanzigtausendsechs  ->  one hundred and twenty-three thousand and six

The numbers below 10^6 are distinct, so a number to test on never occurs in training. One half is uniform. The
other half is uniform in the number of digits, as long as there are such numbers. The words are num2words'.
"""

import random
from functools import partial
from pathlib import Path

from dgc_datasets.prepare import prepare_folder
from dgc_datasets.translation.parallel_text import ParallelText

DIGITS = 6
# Above it, the draw of distinct numbers would take long.
MAX_NUMBERS = 10**DIGITS // 2


class NumberWords(ParallelText):
    """{'train', 'test'}: `ParallelText` of numbers in words. The text is written once, to a folder in `root`.

    Args:
        root: folder of the text files and of the vocabulary. Writing them takes about 10 seconds.
        source: language of the source, as num2words names it.
        target: language of the target.
        train_numbers: pairs to train on.
        test_numbers: pairs to test on.
        vocabulary_size: as in `ParallelText`.
        max_length: as in `ParallelText`.
        seed: of the draw of numbers.

    Raises:
        ValueError: if num2words does not know a language, or if a number is out of range.
    """

    def __init__(
        self,
        root: str = "data/numwords",
        source: str = "de",
        target: str = "en",
        train_numbers: int = 30_000,
        test_numbers: int = 2_000,
        vocabulary_size: int = 128,
        max_length: int = 128,
        seed: int = 0,
    ) -> None:
        for name, value in (("train_numbers", train_numbers), ("test_numbers", test_numbers)):
            if value < 1:
                raise ValueError(f"dataset.{name} is {value}; it must be at least 1")
        if train_numbers + test_numbers > MAX_NUMBERS:
            raise ValueError(
                f"dataset.train_numbers + dataset.test_numbers is {train_numbers + test_numbers}; it must be at "
                f"most {MAX_NUMBERS}"
            )
        languages = (source, target)
        check_languages(languages)
        folder = Path(root).expanduser() / f"{source}-{target}-{train_numbers}-{test_numbers}-{seed}"
        prepare_folder(folder, partial(write_text, languages, train_numbers, test_numbers, seed))
        super().__init__(str(folder), source, target, vocabulary_size, max_length, character_coverage=1.0)


def check_languages(languages: tuple[str, str]) -> None:
    """Raises ValueError for a language that num2words does not know, or the same twice."""
    from num2words import CONVERTER_CLASSES

    if languages[0] == languages[1]:
        raise ValueError(f"dataset.source and dataset.target are both {languages[0]!r}; they name two languages")

    for name, language in zip(("source", "target"), languages, strict=True):
        if language not in CONVERTER_CLASSES:
            raise ValueError(
                f"dataset.{name} is {language!r}; num2words knows {', '.join(sorted(CONVERTER_CLASSES))}"
            )


def write_text(languages: tuple[str, str], train_numbers: int, test_numbers: int, seed: int, place: Path) -> None:
    """Writes the text files of both splits into `place`."""
    from num2words import num2words

    numbers = draw_numbers(train_numbers + test_numbers, seed)
    for split, chosen in (("test", numbers[:test_numbers]), ("train", numbers[test_numbers:])):
        for language in languages:
            text = "".join(f"{num2words(number, lang=language)}\n" for number in chosen)
            (place / f"{split}.{language}").write_text(text, encoding="utf-8")


def draw_numbers(count: int, seed: int) -> list[int]:
    """Distinct numbers from 0 to 10^6 - 1, in random order."""
    draw = random.Random(seed)
    found: dict[int, None] = {}
    while len(found) < count:
        digits = draw.randint(1, DIGITS)
        of_so_many_digits = draw.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        found |= dict.fromkeys((draw.randrange(10**DIGITS), of_so_many_digits))
    numbers = list(found)[:count]
    draw.shuffle(numbers)
    return numbers
