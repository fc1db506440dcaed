"""Writes the text files of `ParallelText` from the files of a shared task, such as WMT'16 English-German.

    python -m dgc_datasets.translation.wmt16 --root data/wmt16 --val newstest2013 --test newstest2014 \\
        --train europarl-v7.de-en commoncrawl.de-en news-commentary-v11.de-en

Every name is the beginning of two file names: europarl-v7.de-en.en and europarl-v7.de-en.de. A file may also be
SGML, as the test sets are. Of the beginning newstest2014 the script takes newstest2014*-src.en.sgm and
newstest2014*-ref.de.sgm: the official set has both languages as source and as reference. Where no name has -src or
-ref, it takes newstest2014*.en.sgm and newstest2014*.de.sgm. Nothing is downloaded: the files are
from https://statmt.org/wmt16.

Training pairs are left out if a side is empty or has more than `--max-words` words, or if one side has more than
`--max-ratio` times as many words as the other. Test pairs are never left out.
"""

import argparse
import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dgc_datasets.prepare import prepare_folder
from dgc_datasets.translation.parallel_text import lines

SEGMENT = re.compile(r"<seg[^>]*>(.*?)</seg>", re.S | re.I)


def find_text(beginning: str, language: str, part: str) -> Path:
    """The text or SGML file of one language. Raises ValueError if there is not exactly one.

    Args:
        beginning: of the file's name.
        language: its ending.
        part: "src" or "ref", which the name of an SGML file may have.
    """
    path = Path(beginning).expanduser()
    found = [path.with_name(f"{path.name}.{language}")]
    if not found[0].is_file():
        found = sorted(path.parent.glob(f"{path.name}*-{part}.{language}.sgm"))
        found = found or sorted(path.parent.glob(f"{path.name}*.{language}.sgm"))
    if len(found) != 1:
        several = f" are several: {', '.join(map(str, found))}" if found else " is none"
        raise ValueError(
            f"there must be one file {beginning}.{language} or {beginning}*.{language}.sgm, but there{several}"
        )
    return found[0]


def sentences(file: Path) -> Iterator[str]:
    """The sentences of a text or SGML file, with single spaces between their words."""
    if file.suffix == ".sgm":
        texts: Iterator[str] = (html.unescape(text) for text in SEGMENT.findall(file.read_text(encoding="utf-8")))
    else:
        texts = lines(file)
    return (" ".join(text.split()) for text in texts)


def pairs(beginnings: Sequence[str], languages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The pairs of all files, in order. Raises ValueError if two files have not the same number of sentences."""
    for beginning in beginnings:
        first, second = map(find_text, (beginning, beginning), languages, ("src", "ref"))
        try:
            yield from zip(sentences(first), sentences(second), strict=True)
        except ValueError as error:
            raise ValueError(f"{first} and {second} do not fit together: {error}") from error


def is_usable(pair: tuple[str, str], max_words: int, max_ratio: float) -> bool:
    """Whether a pair is one to train on."""
    shorter, longer = sorted(len(side.split()) for side in pair)
    return shorter > 0 and longer <= max_words and longer <= max_ratio * shorter


def write(options: argparse.Namespace, place: Path) -> None:
    """Writes the text files of every split into `place`, and prints how many pairs each has."""
    languages = (options.source, options.target)
    for split in ("train", "val", "test"):
        beginnings = getattr(options, split)
        if not beginnings:
            continue
        read = kept = 0
        with (
            open(place / f"{split}.{languages[0]}", "w", encoding="utf-8", newline="\n") as first,
            open(place / f"{split}.{languages[1]}", "w", encoding="utf-8", newline="\n") as second,
        ):
            for pair in pairs(beginnings, languages):
                read += 1
                if split == "train" and not is_usable(pair, options.max_words, options.max_ratio):
                    continue
                kept += 1
                first.write(f"{pair[0]}\n")
                second.write(f"{pair[1]}\n")
        print(f"{split}: {kept} of {read} pairs")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line above."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--train", nargs="+", required=True, help="beginnings of the training files' names")
    parser.add_argument("--val", nargs="+", default=[], help="the same for validation")
    parser.add_argument("--test", nargs="+", required=True, help="the same for the test")
    parser.add_argument("--root", type=Path, default=Path("data/wmt16"), help="the folder to write, which is new")
    parser.add_argument("--source", default="en")
    parser.add_argument("--target", default="de")
    parser.add_argument("--max-words", type=int, default=250)
    parser.add_argument("--max-ratio", type=float, default=1.5)
    options = parser.parse_args(argv)
    if options.root.exists():
        parser.exit(1, f"{options.root} exists already; remove it first, or name another folder with --root\n")
    try:
        prepare_folder(options.root, lambda place: write(options, place))
    except ValueError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
