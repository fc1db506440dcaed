"""Digits' folds; torchvision beside a torch that it does not fit."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import patient
from warm import python

from dgc_datasets import Digits
from dgc_datasets.digits import stratified_folds
from dgc_training.constructors import import_target


def test_every_image_is_tested_once_over_the_folds() -> None:
    tested = [Digits(fold)["test"][:] for fold in range(5)]
    images = torch.cat([images for images, _ in tested])
    assert images.shape == (1797, 1, 8, 8) and images.dtype == torch.float32
    whole = torch.cat([Digits(0)[split][:][0] for split in ("train", "test")])

    def rows(x: Any) -> Any:
        return sorted(map(tuple, x.flatten(1).tolist()))

    assert rows(images) == rows(whole)
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
        with pytest.raises(ValueError, match=name):
            Digits(**{name: value})


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


def test_torchvision_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert compat.declare_missing_operators() == []
    assert compat._declared == []
