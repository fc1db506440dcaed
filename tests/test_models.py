"""Models: sizes, shapes, and that they learn."""

import pytest
import torch
from cases import case

import dgc_models
from dgc_models import DigitsCNN, alexnet, resnet18, resnet20
from dgc_models.densenet_cifar import DenseLayer
from dgc_models.resnet_cifar import Bottleneck, Projection, ResNet, resnet_of_depth
from dgc_models.senet_cifar import PreActivationBlock, SqueezeExcitation

# the name, the parameters, the tensors, the matrices, the features
MODELS = [
    ("resnet20", 269_722, 59, 20, 64),
    ("resnet56", 853_018, 167, 56, 64),
    ("resnet110", 1_727_962, 329, 110, 64),
    ("resnet18", 11_173_962, 62, 21, 512),
    ("resnet50", 23_520_842, 161, 54, 2048),
    ("resnet101", 42_512_970, 314, 105, 2048),
    ("vgg16_bn", 14_728_266, 54, 14, 512),
    ("vgg19_bn", 20_040_522, 66, 17, 512),
    ("alexnet", 2_472_266, 12, 6, 256),
    ("densenet121", 6_956_298, 362, 121, 1024),
    ("densenet169", 12_493_322, 506, 169, 1664),
    ("senet18", 11_260_354, 88, 37, 512),
]


def test_sizes() -> None:
    for name, parameters, tensors, matrices, features in MODELS:
        with case(name), torch.device("meta"):
            model = getattr(dgc_models, name)()
            assert sum(p.numel() for p in model.parameters()) == parameters
            assert len(list(model.parameters())) == tensors
            assert sum(p.dim() > 1 for p in model.parameters()) == matrices
            assert model.classifier.weight.shape == (10, features)
            assert {"features.0.weight", "classifier.bias"} <= set(model.state_dict())


@pytest.mark.parametrize("name", [row[0] for row in MODELS[3:]])
def test_the_larger_cifar_models(name: str) -> None:
    """The scale of the features neither explodes nor dies on the way, there and back."""
    torch.manual_seed(0)
    model = getattr(dgc_models, name)(num_classes=100)
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 100) and 0.05 < logits.std() < 5
    logits.square().mean().backward()
    for where, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), where


def test_other_images_and_classes() -> None:
    for name, edge in (("resnet50", 8), ("densenet121", 8), ("senet18", 8), ("vgg19_bn", 48), ("alexnet", 48)):
        with case(name):
            model = getattr(dgc_models, name)(num_classes=7, in_channels=1)
            assert model(torch.randn(2, 1, edge, edge)).shape == (2, 7)
    for channels, edge, classes in ((3, 32, 10), (1, 8, 10), (3, 32, 100)):
        model = resnet20(num_classes=classes, in_channels=channels)
        assert model(torch.randn(2, channels, edge, edge)).shape == (2, classes)
    # all stages but the first halve the image
    images = torch.randn(1, 3, 32, 32)
    assert resnet20().features[:-2](images).shape == (1, 64, 8, 8)
    assert resnet18().features[:-2](images).shape == (1, 512, 4, 4)
    assert sum(p.numel() for p in DigitsCNN(num_classes=10).parameters()) == 226_794
    for digits in (DigitsCNN(num_classes=10), DigitsCNN(width=8)):
        assert digits(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    # without batch norm only AlexNet's initialisation keeps the logits from being the same for every image
    torch.manual_seed(0)
    with torch.no_grad():
        assert alexnet()(torch.randn(32, 3, 32, 32)).std(0).mean() > 0.03
    for depth in (2, 7, 21):
        with pytest.raises(ValueError, match="6n"):
            resnet_of_depth(depth)
    with pytest.raises(ValueError):
        ResNet((16, 32), (1, 1, 1), Projection)


def test_blocks() -> None:
    block = Bottleneck(64, 256, 2)
    assert [tuple(p.shape[:2]) for p in block.body.parameters() if p.dim() == 4] == [(64, 64), (64, 64), (256, 64)]
    assert isinstance(block.shortcut, Projection) and block(torch.randn(2, 64, 8, 8)).shape == (2, 256, 4, 4)
    assert isinstance(Bottleneck(256, 256, 1).shortcut, torch.nn.Identity)
    # dense layers keep what they read
    x = torch.randn(2, 6, 4, 4)
    before, y = x.clone(), DenseLayer(6, 5)(x)
    assert y.shape == (2, 11, 4, 4) and torch.equal(y[:, :6], before) and torch.equal(x, before)
    # squeeze and excitation scales channels
    x = torch.randn(2, 32, 4, 4)
    factors = SqueezeExcitation(32)(x) / x
    assert torch.allclose(factors, factors[:, :, :1, :1].expand_as(x), atol=1e-4)
    assert ((factors > 0) & (factors < 1)).all() and factors[0].std() > 0
    # pre-activation blocks pass their input on untouched
    residual, x = PreActivationBlock(16, 16, 1), torch.randn(2, 16, 4, 4)
    last, before = residual.body[3], x.clone()
    assert isinstance(last, torch.nn.Conv2d)
    torch.nn.init.zeros_(last.weight)
    assert torch.equal(residual(x), before)
