"""Models: sizes, shapes, and that they learn."""

import pytest
import torch

from models import DigitsCNN, resnet18, resnet20, resnet56, resnet110, vgg16_bn
from models.resnet_cifar import resnet_of_depth


@pytest.mark.parametrize(
    ("make", "parameters", "tensors", "matrices"),
    [
        (resnet20, 269_722, 59, 20),
        (resnet56, 853_018, 167, 56),
        (resnet110, 1_727_962, 329, 110),
        (resnet18, 11_173_962, 62, 21),
        (vgg16_bn, 14_728_266, 54, 14),
    ],
)
def test_sizes(make, parameters, tensors, matrices):
    model = make()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(list(model.parameters())) == tensors
    assert sum(p.dim() > 1 for p in model.parameters()) == matrices


@pytest.mark.parametrize(("channels", "edge", "classes"), [(3, 32, 10), (1, 8, 10), (3, 32, 100)])
def test_cifar_resnet_shapes(channels, edge, classes):
    model = resnet20(num_classes=classes, in_channels=channels)
    assert model(torch.randn(2, channels, edge, edge)).shape == (2, classes)
    assert {"features.0.weight", "classifier.bias"} <= set(model.state_dict())


@pytest.mark.parametrize("make", [resnet18, vgg16_bn])
def test_the_larger_cifar_models(make):
    """Shapes, and that the scale of the features neither explodes nor dies on the way."""
    torch.manual_seed(0)
    model = make(num_classes=100)
    logits = model(torch.randn(4, 3, 32, 32))
    assert logits.shape == (4, 100) and 0.05 < logits.std() < 5
    assert model.classifier.weight.shape == (100, 512)


@pytest.mark.parametrize("depth", [2, 7, 21])
def test_impossible_depths_are_refused(depth):
    with pytest.raises(ValueError, match="6n"):
        resnet_of_depth(depth)


def test_digits_cnn():
    model = DigitsCNN(num_classes=10)
    assert sum(p.numel() for p in model.parameters()) == 226_794
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert DigitsCNN(width=8)(torch.randn(2, 1, 8, 8)).shape == (2, 10)
