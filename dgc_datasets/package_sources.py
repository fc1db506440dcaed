"""Sources of Python packages that `make setup` installs, as characters or subwords. Nothing is downloaded.

About 120 million characters: Python's standard library and `PACKAGES`, in the versions that are named there: other
versions are other data. A hash of all files is part of `sources.json`, beside the tokens. Tests, tables (files of
200 kB or more), code that packages have taken over from others (`_vendor`), and second copies of a file are left
out. A hash of its name decides whether a file is held out, as in `python_sources`, and where it is in the order.

The files are read and turned into tokens once, by one process per machine. Afterwards the tokens are mapped into
memory, so that any number of ranks share them and the system reads ahead what is used.
"""

import hashlib
import json
import sysconfig
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgc_datasets.prepare import prepare_folder
from dgc_datasets.python_sources import UNKNOWN, is_held_out, source_files, to_codes

# {folder: (name in the registry, version)}
PACKAGES: Mapping[str, tuple[str, str]] = {
    "torch": ("torch", "2.13.0"),
    "torchgen": ("torch", "2.13.0"),
    "torchvision": ("torchvision", "0.28.0"),
    "numpy": ("numpy", "2.4.6"),
    "scipy": ("scipy", "1.17.1"),
    "sklearn": ("scikit-learn", "1.9.1"),
    "sympy": ("sympy", "1.14.0"),
    "mpmath": ("mpmath", "1.3.0"),
    "networkx": ("networkx", "3.6.1"),
    "matplotlib": ("matplotlib", "3.10.9"),
    "PIL": ("pillow", "13.0.0"),
    "fontTools": ("fonttools", "4.68.0"),
    "pygments": ("Pygments", "2.21.0"),
    "mypy": ("mypy", "1.19.1"),
    "beartype": ("beartype", "0.22.9"),
    "textual": ("textual", "8.2.8"),
    "rich": ("rich", "15.0.0"),
    "libcst": ("libcst", "1.9.0"),
    "setuptools": ("setuptools", "80.9.0"),
    "tensorboard": ("tensorboard", "2.21.0"),
    "_pytest": ("pytest", "9.0.3"),
}
LEFT_OUT = ("_vendor", "testing", "_testing", "sample_data")
BUILT = "version.py"  # written by the build of a package, which differs between a wheel with CUDA and one without
TRAINED_ON = 10  # subwords are learned from every 10th file
SPLITS = ("train", "test")


def installed_versions() -> dict[str, str]:
    """{name in the registry: version} of `PACKAGES`. Raises ValueError if one is not as it is there."""
    wanted = dict(PACKAGES.values())
    wrong = []
    for name, expected in wanted.items():
        try:
            found = version(name).partition("+")[0]
        except PackageNotFoundError:
            found = "not installed"
        if found != expected:
            wrong.append(f"{name}=={expected} ({found})")
    if wrong:
        raise ValueError(f"the data are the sources of other versions: install {', '.join(wrong)}")
    return wanted


def is_used(name: str) -> bool:
    """Whether a file of a package is code that its authors have written, and no test."""
    *folders, file = name.split("/")
    is_test = file.startswith(("test_", "conftest")) or file.endswith("_test.py")
    return not is_test and file != BUILT and not any(folder in LEFT_OUT for folder in folders)


def files_used() -> list[tuple[str, bytes]]:
    """(name, content) of all files, in the order of the hashes of their names."""
    paths = sysconfig.get_paths()
    roots = {"python": Path(paths["stdlib"])} | {name: Path(paths["purelib"], name) for name in PACKAGES}
    named = [
        (f"{package}/{name}", path)
        for package, root in roots.items()
        for name, path in source_files(root)
        if is_used(name)
    ]
    found, seen = [], set()
    for name, path in sorted(named, key=lambda pair: hashlib.sha256(pair[0].encode()).digest()):
        content = path.read_bytes()
        if (digest := hashlib.sha256(content).digest()) not in seen:
            seen.add(digest)
            found.append((name, content))
    return found


def digest_of(files: list[tuple[str, bytes]]) -> str:
    """SHA-256 of the names and contents of files."""
    lines = [f"{name} {hashlib.sha256(content).hexdigest()}\n" for name, content in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def split(files: list[tuple[str, bytes]]) -> dict[str, list[str]]:
    """The texts of each split."""
    texts: dict[str, list[str]] = {name: [] for name in SPLITS}
    for name, content in files:
        texts["test" if is_held_out(name) else "train"].append(content.decode("utf-8", "replace"))
    if not all(texts.values()):
        raise ValueError("there are no Python sources here: use a Python with its standard library and packages")
    return texts


def as_characters(texts: Mapping[str, list[str]], size: int) -> dict[str, np.ndarray]:
    """Ids of characters, uint8 [n]: the most frequent ones of the training data, and 0 for others."""
    codes = {name: to_codes("".join(of)) for name, of in texts.items()}
    values, counts = np.unique(codes["train"], return_counts=True)
    known = values[np.lexsort((values, -counts))][: size - 1]
    ids = np.full(0x110000, UNKNOWN, dtype=np.uint8)
    ids[known] = np.arange(1, len(known) + 1)
    return {name: ids[of] for name, of in codes.items()}


def learn_subwords(texts: list[str], size: int) -> bytes:
    """A byte-pair encoding (Sennrich et al. 2016) by sentencepiece. It keeps every character, spaces included."""
    from sentencepiece import SentencePieceTrainer

    lines = (line for text in texts for line in text.split("\n") if line)
    model = BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["\n"],
        byte_fallback=True,
        bos_id=-1,
        eos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def as_subwords(texts: Mapping[str, list[str]], model: bytes) -> dict[str, np.ndarray]:
    """Ids of subwords, int16 [n]."""
    from sentencepiece import SentencePieceProcessor

    processor: Any = SentencePieceProcessor(model_proto=model)
    return {
        name: np.concatenate([np.asarray(processor.encode(text), dtype=np.int16) for text in of])
        for name, of in texts.items()
    }


def write(place: Path, vocabulary_size: int, subwords: bool) -> None:
    """Write the tokens of both splits, and what they are made of."""
    versions, files = installed_versions(), files_used()
    texts = split(files)
    if subwords:
        model = learn_subwords(texts["train"][::TRAINED_ON], vocabulary_size)
        (place / "subwords.model").write_bytes(model)
        tokens = as_subwords(texts, model)
    else:
        tokens = as_characters(texts, vocabulary_size)
    for name, of in tokens.items():
        of.tofile(place / f"{name}.bin")
    about = {
        "python": sysconfig.get_python_version(),
        "packages": versions,
        "files": len(files),
        "sha256": digest_of(files),
        "characters": {name: sum(map(len, of)) for name, of in texts.items()},
        "tokens": {name: len(of) for name, of in tokens.items()},
        "tokens_sha256": {name: hashlib.sha256(of.tobytes()).hexdigest() for name, of in tokens.items()},
    }
    (place / "sources.json").write_text(json.dumps(about, indent=1) + "\n")


class PackageSources(dict[str, Tensor]):
    """{'train', 'test'}: token ids, uint8 or int16 [n].

    Args:
        vocabulary_size: number of ids. Of characters at most 256.
        subwords: whether tokens are subwords, and not characters.
        test_tokens: tokens of the test data to use, from the first on. None: all, a 20th of the training data.
        root: folder of the tokens, which are made if they are not there.

    Attributes:
        about: versions of the packages, hashes, characters and tokens of each split.

    Raises:
        ValueError: if a package is missing or has another version, or an argument is out of range.

    Example:
        tokens = PackageSources(vocabulary_size=4096, subwords=True)["train"]
    """

    def __init__(
        self,
        vocabulary_size: int = 128,
        subwords: bool = False,
        test_tokens: int | None = None,
        root: str = "data/package-sources",
    ) -> None:
        least, most = (512, 2**15 - 1) if subwords else (2, 256)
        if not least <= vocabulary_size <= most:
            raise ValueError(f"dataset.vocabulary_size is {vocabulary_size}; it must be from {least} to {most}")
        if test_tokens is not None and test_tokens < 2:
            raise ValueError(f"dataset.test_tokens is {test_tokens}; it must be at least 2")
        folder = Path(root) / f"{'subwords' if subwords else 'characters'}-{vocabulary_size}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        prepare_folder(folder, lambda place: write(place, vocabulary_size, subwords))
        self.about: dict[str, Any] = json.loads((folder / "sources.json").read_text())
        dtype = torch.int16 if subwords else torch.uint8
        sizes = self.about["tokens"]
        tokens = {
            name: torch.from_file(str(folder / f"{name}.bin"), size=sizes[name], dtype=dtype) for name in SPLITS
        }
        tokens["test"] = tokens["test"][:test_tokens]
        super().__init__(tokens)
