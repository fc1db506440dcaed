"""Digits' folds, and CIFAR and ImageNet from small files in the real formats; torchvision beside a torch that does
not fit it."""

import hashlib
import multiprocessing
import pickle
import runpy
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from environment import patient
from refusals import refuse
from small_data import FOLDERS, write_cifar, write_imagenet
from torch.utils.data import DataLoader
from warm import python

from dgc_datasets import CIFAR, Digits, ImageNet
from dgc_datasets.digits import stratified_folds
from dgc_datasets.prepare import prepare_once, unpack
from dgc_training.config import ConfigError, instantiate, load
from dgc_training.constructors import import_target

CIFAR10 = import_target("torchvision.datasets.CIFAR10")
Patch = pytest.MonkeyPatch
Printed = pytest.CaptureFixture[str]
# in processes of their own: whatever torchvision is installed, it imports after the compatibility file
COMPATIBLE = """
import dgc_datasets.torchvision_compat as compat
from torchvision.models import resnet18
from torchvision.datasets import CIFAR10
assert sum(p.numel() for p in resnet18().parameters()) == 11_689_512
assert compat.declare_missing_operators() == []
assert bool(compat._declared) != compat.operators_load()
"""
# and in a config file, as the original's files import their models
IN_A_CONFIG = """
import sys
from dgc_training.config import load
assert 'torchvision' not in sys.modules
tree = load(['configs/digits/cnn.py', 'mine.py'])
assert tree.model._target_ == 'torchvision.models.resnet18'
"""


@pytest.mark.parametrize("num_classes", [10, 100])
def test_cifar(tmp_path: Path, monkeypatch: Patch, num_classes: int) -> None:
    write_cifar(tmp_path, num_classes, train=200, test=120)
    data: Any = CIFAR(str(tmp_path), num_classes)
    assert [len(data[split]) for split in ("train", "test")] == [200, 120]
    image, label = data["test"][117]
    assert image.shape == (3, 32, 32) and image.dtype == torch.float32
    assert type(label) is int and label == 117 % num_classes
    per_file = 40 if num_classes == 10 else 200
    assert [label for _, label in data["train"]] == [i % per_file % num_classes for i in range(200)]
    # one rank per machine prepares: a prepared data set is only read
    assert [path.name for path in tmp_path.iterdir()] == [FOLDERS[num_classes]]
    # training images are shifted and flipped, test images are not
    torch.manual_seed(0)
    assert len({tuple(data["train"][0][0].flatten().tolist()) for _ in range(8)}) > 6
    assert torch.equal(data["test"][0][0], data["test"][0][0])
    smaller = CIFAR(str(tmp_path), num_classes, image_size=24)
    assert smaller["train"][0][0].shape == smaller["test"][0][0].shape == (3, 24, 24)
    # channels, rows and normalization: the test images equal the images of torchvision's own reader
    reader = CIFAR10 if num_classes == 10 else import_target("torchvision.datasets.CIFAR100")
    monkeypatch.setattr(reader, "_check_integrity", lambda self: True)
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": None})
    theirs = reader(tmp_path, train=False)
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2023, 0.1994, 0.2010])
    for (image, label), (expected, expected_label) in zip(data["test"], theirs, strict=True):
        scaled = torch.from_numpy(np.array(expected)).permute(2, 0, 1) / 255
        torch.testing.assert_close(image, (scaled - mean[:, None, None]) / std[:, None, None])
        assert label == expected_label


@pytest.mark.parametrize("kind", ["cifar", "imagenet"])
def test_a_part_of_the_training_images_is_held_out(tmp_path: Path, kind: Any) -> None:
    """As many of each class, always the same, and seen as test images are: without crops and flips."""
    if kind == "cifar":
        write_cifar(tmp_path, train=200)
        make: Callable[..., Any] = partial(CIFAR, str(tmp_path), 10)
    else:
        write_imagenet(tmp_path, classes=10, train=20)
        make = partial(ImageNet, str(tmp_path), 10, 32)
    data = make(val_ratio=0.25)
    assert list(data) == ["train", "val", "test"] and (len(data["train"]), len(data["val"])) == (150, 50)
    assert [label for _, label in make(val_ratio=0.01)["val"]].count(3) == 1
    for split in ("train", "val"):
        counts = torch.tensor([label for _, label in data[split]]).bincount(minlength=10)
        assert (counts == counts[0]).all()
    torch.testing.assert_close(data["val"][7][0], make(val_ratio=0.25)["val"][7][0], rtol=0, atol=0)
    for ratio in (0.0, 1.0, -0.5):
        refuse(f"dataset.val_ratio is {ratio}", make, val_ratio=ratio)


def test_cifar_refuses_what_does_not_fit(tmp_path: Path, monkeypatch: Patch) -> None:
    tree = load(["configs/cifar/resnet20"], ["--configs.dataset.root", str(tmp_path / "none")])
    with pytest.raises(ConfigError) as told:
        instantiate(tree.dataset)
    for part in ("none/cifar-10-batches-py", "cifar-10-python.tar.gz", "dataset.root", "dataset.download true"):
        assert part in str(told.value)
    assert not (tmp_path / "none").exists()
    file, one = write_cifar(tmp_path) / "data_batch_3", np.zeros((1, 3072), np.uint8)
    for name, value in (("num_classes", 11), ("image_size", 0), ("image_size", 41)):
        refuse(f"dataset.{name} is {value}", CIFAR, str(tmp_path), **{name: value})
    # a damaged file is named
    monkeypatch.chdir(tmp_path)
    whole = file.read_bytes()
    unreadable = (whole[: len(whole) // 2], b"", b"\x00" * len(whole), [1, 2])
    damages: list[tuple[Any, str]] = [
        *((content, "cannot be read") for content in unreadable),
        ({"labels": [1]}, "it has no 'data'"),
        ({"data": one.repeat(3, 0), "labels": [0, 1]}, "2 labels"),
        ({"data": one.astype(float), "labels": [0]}, "float64"),
        ({"data": one, "labels": [10]}, "labels from 10 to 10"),
        (pickle.dumps({"data": one[:0], "labels": []}), "0 labels"),
        (b"cposix\nmkdir\n(Vevil\ntR.", "it asks for posix.mkdir"),  # calls os.mkdir("evil")
    ]
    for content, reason in damages:
        file.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol=2))
        refuse(f"data_batch_3 .*{reason}", CIFAR, str(tmp_path))
    assert not Path("evil").exists()
    # one of the official size must have the official checksum
    file.write_bytes(whole)
    official = pickle.dumps({"data": one.repeat(10_000, 0), "labels": [0] * 10_000}, protocol=2)
    file.with_name("test_batch").write_bytes(official)
    refuse("test_batch is damaged: .*checksum", CIFAR, str(tmp_path))


def refused_of_200(file: Path, seed: int, head: int, tail: int, use: Callable[[], Any]) -> int:
    """How many of 200 files with one other byte among the first or the last ones, or cut, are refused by name."""
    whole, random, refused = file.read_bytes(), np.random.default_rng(seed), 0
    for _ in range(200):
        content = bytearray(whole)
        content[int(random.choice([random.integers(head), -1 - random.integers(tail)]))] = random.integers(256)
        file.write_bytes(content[: random.integers(len(content))] if random.random() < 0.2 else content)
        try:
            use()
        except ValueError as error:
            assert file.name in str(error)
            refused += 1
    return refused


def test_damage_anywhere_in_a_file_gives_a_message_or_a_data_set(tmp_path: Path) -> None:
    """Never another exception. Most of a file of CIFAR is pixels: aim at what stands before and after them."""
    file = write_cifar(tmp_path / "cifar", train=10, test=2) / "data_batch_1"
    assert refused_of_200(file, 1, 200, 100, lambda: CIFAR(str(tmp_path / "cifar"))) > 100
    write_imagenet(tmp_path / "imagenet", classes=1, train=1, test=1)
    data: Any = ImageNet(str(tmp_path / "imagenet"), 1, image_size=16)["test"]
    file = Path(data.samples[0][0])
    assert refused_of_200(file, 2, 300, len(file.read_bytes()), lambda: data[0][0].view(3, 16, 16)) > 40


@pytest.mark.filterwarnings("ignore:Python 3.14 will")
@pytest.mark.parametrize("knows_filters", [True, False])  # Python 3.11 before 3.11.4 does not
def test_an_archive_is_unpacked_here_alone(tmp_path: Path, monkeypatch: Patch, knows_filters: bool) -> None:
    if not knows_filters:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    elif not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python's tarfile has no filters")
    (tmp_path / "file").write_text("text")
    for name in ("../outside", "data/../../outside", "data/link", "data/file"):
        with tarfile.open(tmp_path / "archive.tar", "w") as tar, open(tmp_path / "file", "rb") as file:
            member = tar.gettarinfo(arcname=name, fileobj=file)
            if name.endswith("link"):
                member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc", 0
            tar.addfile(member, file)
        with nullcontext() if name == "data/file" else pytest.raises(ValueError, match="cannot be unpacked"):
            unpack(tmp_path / "archive.tar", "data")
    assert {path.name for path in tmp_path.iterdir()} == {"archive.tar", "data", "file"}
    assert (tmp_path / "data/file").read_text() == "text"


@pytest.fixture
def archive(monkeypatch: Patch, tmp_path: Path) -> Path:
    """The archive of a small CIFAR, alone in its folder."""
    folder = write_cifar(tmp_path / "data")
    archive = folder.with_name("cifar-10-python.tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    shutil.rmtree(folder)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    return archive


@pytest.fixture
def address(archive: Path) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(archive.parent))) as http:
        Thread(target=partial(http.serve_forever, 0.01), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/{archive.name}"
        http.shutdown()


def test_an_archive_is_downloaded(archive: Path, address: str, monkeypatch: Patch, tmp_path: Path) -> None:
    """Also over what an interrupted download left."""
    root = tmp_path / "new"
    root.mkdir()
    (root / archive.name).write_bytes(b"half")
    monkeypatch.setattr(CIFAR10, "url", address)
    data: Any = CIFAR(str(root), download=True)
    assert len(data["test"]) == 16


def test_an_address_without_the_archive_is_refused(address: str, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(CIFAR10, "url", f"{address}.away")
    refuse(r"could not be downloaded .*404.* other means", CIFAR, str(tmp_path / "new"), download=True)


def test_a_data_set_that_is_there_is_not_downloaded(tmp_path: Path) -> None:
    there = write_cifar(tmp_path / "there").parent
    there.chmod(0o500)
    data: Any = CIFAR(str(there), download=True)
    there.chmod(0o700)
    assert len(data["train"]) == 40 and not (there / ".preparing").exists()


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_archive_is_unpacked(archive: Path, interrupted: bool) -> None:
    """Also over what an interrupted unpacking left."""
    left = archive.parent / "cifar-10-batches-py"
    if interrupted:
        left.mkdir()
        (left / "data_batch_1").write_bytes(b"half")
    data: Any = CIFAR(str(archive.parent))
    assert len(data["train"]) == 40
    assert {path.name for path in archive.parent.iterdir()} == {archive.name, left.name, ".preparing"}


def test_a_damaged_archive_is_named(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:-100])
    refuse(r"cifar-10-python\.tar\.gz is damaged.*download true", CIFAR, str(archive.parent))
    assert not (archive.parent / "cifar-10-batches-py").exists()


def prepare_slowly(root: Path, started: Any) -> None:
    done, counter = root / "done", root / "count"

    def work() -> None:
        with counter.open("a") as count:
            count.write("x")
        if len(counter.read_text()) == 1:
            raise ValueError("the first one fails")
        done.touch()

    started.wait()
    prepare_once(root, done.exists, work)
    assert done.exists()


def test_one_of_several_processes_prepares_while_the_others_wait(tmp_path: Path) -> None:
    """The first fails on purpose: the next one takes over, and only it."""
    context = multiprocessing.get_context("fork")
    started = context.Barrier(4)
    processes = [context.Process(target=prepare_slowly, args=(tmp_path, started)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(patient(60))
    assert Counter(process.exitcode for process in processes) == {0: 3, 1: 1}
    assert (tmp_path / "count").read_text() == "xx"


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refuse("cannot be prepared in .*file/data", prepare_once, tmp_path / "file/data", lambda: False, lambda: None)


def test_imagenet(tmp_path: Path) -> None:
    write_imagenet(tmp_path, classes=5, train=6, test=3)
    data: Any = ImageNet(str(tmp_path), num_classes=4, image_size=32)
    assert [len(data[split]) for split in ("train", "test")] == [24, 12]
    for split in ("train", "test"):
        labels = [label for _, label in data[split]]
        assert labels == sorted(labels) and set(labels) == {0, 1, 2, 3}
        image = data[split][5][0]
        assert image.shape == (3, 32, 32) and image.dtype == torch.float32
    assert not torch.equal(data["train"][0][0], data["train"][0][0])
    assert torch.equal(data["test"][0][0], data["test"][0][0])
    grey = (data["test"][0][0].mean() * 0.225 + 0.45) * 255
    assert abs(grey - 255 / 10) < 10, "the first class is the darkest"
    # fewer classes than folders take every nth
    few: Any = ImageNet(str(tmp_path), num_classes=2)["train"]
    assert [(path[-15:-7], label) for path, label in few.samples[::6]] == [("01440764", 0), ("01440766", 1)]
    # what does not fit is refused
    root = tmp_path / "data"
    tree = load(["configs/imagenet/resnet50"], ["--configs.dataset.root", str(root)])
    with pytest.raises(ConfigError, match=r"data/train is no folder. Make ROOT/train/CLASS.*dataset\.root"):
        instantiate(tree.dataset)
    write_imagenet(root, classes=2)
    with pytest.raises(ConfigError, match="has 2 class folders, but dataset.num_classes is 1000"):
        instantiate(tree.dataset)
    shutil.move(root / "val/n01440764", root / "val/n09999999")
    refuse("n01440764, n09999999 in one of them only", ImageNet, str(root), 2)
    shutil.move(root / "val/n09999999", root / "val/n01440764")
    for file in (root / "val/n01440765").iterdir():
        file.unlink()
    refuse("val: .*n01440765", ImageNet, str(root), 2)
    shutil.rmtree(root / "train")
    (root / "train").mkdir()
    refuse("no class folders", ImageNet, str(root), 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named(tmp_path: Path, workers: Any) -> None:
    """Also by a loader's worker, which starts from nothing and imports torchvision anew."""
    write_imagenet(tmp_path, classes=1, train=2)
    file = tmp_path / "train/n01440764/n01440764_1.JPEG"
    data = ImageNet(str(tmp_path), 1, image_size=16)["train"]
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "forkserver"} if workers else {}
    assert next(iter(DataLoader(data, 2, **options)))[0].shape == (2, 3, 16, 16)
    file.write_bytes(file.read_bytes()[:300])
    refuse("n01440764_1.JPEG cannot be read", list, DataLoader(data, 2, **options))


def test_every_image_is_tested_once_over_the_folds() -> None:
    tested = [Digits(fold)["test"][:] for fold in range(5)]
    images = torch.cat([images for images, _ in tested])
    assert images.shape == (1797, 1, 8, 8) and images.dtype == torch.float32
    whole = torch.cat([Digits(0)[split][:][0] for split in ("train", "test")])
    assert sorted(images.flatten(1).tolist()) == sorted(whole.flatten(1).tolist())
    assert abs(images.mean().item()) < 1e-2 and abs(images.std().item() - 1) < 1e-2
    # folds are stratified and fixed
    for _, labels in tested:
        counts = labels.bincount(minlength=10)
        assert len(labels) in (359, 360) and counts.min() >= 34 and counts.max() <= 37
    assert torch.equal(Digits(1)["train"][:][0], Digits(1)["train"][:][0])
    assert stratified_folds([0, 1] * 6, 3, seed=0) == stratified_folds([0, 1] * 6, 3, seed=0)
    assert sorted(sum(stratified_folds([0, 1] * 6, 3), [])) == list(range(12))
    image, label = Digits()["train"][0]
    assert image.shape == (1, 8, 8) and label.dtype == torch.int64 and label.dim() == 0
    for name, value in (("fold", 5), ("fold", -1), ("num_folds", 1), ("num_classes", 9)):
        refuse(name, Digits, **{name: value})


def test_every_program_of_an_environment_imports_torchvision_after_its_set_up(tmp_path: Path) -> None:
    """Only where torchvision needs it, and once: a second set-up leaves nothing of the first."""
    import dgc_datasets.torchvision_compat as compat

    program = f"import site; site.addsitedir({str(tmp_path)!r}); import torchvision, {compat.COPY}"
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    folder = tmp_path / "broken/torchvision"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(broken)
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", str(folder.parent))
        assert compat.install(tmp_path)
    subprocess.run([python(), "-c", program], check=True, timeout=patient(100))
    (folder / "__init__.py").write_text("")
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", str(folder.parent))
        assert not compat.install(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_the_set_up_says_that_it_cured_torchvision(tmp_path: Path, monkeypatch: Patch, capsys: Printed) -> None:
    broken = tmp_path / "torchvision.py"
    broken.write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    runpy.run_path("dgc_datasets/torchvision_compat.py", run_name="__main__")
    assert "It can be imported now" in capsys.readouterr().out


def test_torchvision_imports(tmp_path: Path, monkeypatch: Patch) -> None:
    text = "from torchvision.models import resnet18\nfrom dgc_training.config import Config, configs\n"
    (tmp_path / "mine.py").write_text(text + "configs.model = Config(resnet18, num_classes=10)\n")
    for program in (COMPATIBLE, IN_A_CONFIG.replace("mine.py", str(tmp_path / "mine.py"))):
        subprocess.run([python(), "-W", "error", "-c", program], check=True, timeout=patient(100))
    # nothing is declared where operators load
    import dgc_datasets.torchvision_compat as compat

    import_target("torchvision.models.resnet18")  # with its operators, whatever this test leaves
    monkeypatch.setattr(compat, "operators_load", lambda: True)
    monkeypatch.setattr(compat, "_declared", [])
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    assert compat.declare_missing_operators() == [] and compat._declared == []
