"""Densely connected networks for small images: Huang et al., https://arxiv.org/abs/1608.06993.

The ImageNet networks of the paper's table 1 (DenseNet-BC, growth rate 32), with a 3x3 convolution instead of the
7x7 one and its pooling. They have four blocks of layers. The input of a layer is the output of all previous layers
of its block. A transition between two blocks halves the number of channels and the image size.
"""

import torch
from torch import Tensor, nn


def activated_conv(in_channels: int, out_channels: int, kernel: int) -> list[nn.Module]:
    """Batch norm, ReLU and a convolution, in the paper's order."""
    return [
        nn.BatchNorm2d(in_channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2, bias=False),
    ]


class DenseLayer(nn.Module):
    """Appends `growth` channels to its input. A 1x1 convolution first computes 4 * `growth` channels."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *activated_conv(in_channels, 4 * growth, 1), *activated_conv(4 * growth, growth, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], dim=1)


class DenseNet(nn.Module):
    """Input [n, in_channels, h, w], h and w at least 8; output logits [n, num_classes].

    Args:
        blocks: number of layers of each block. A transition between two blocks keeps half of the channels.
    """

    def __init__(
        self, blocks: tuple[int, ...], growth: int = 32, num_classes: int = 10, in_channels: int = 3
    ) -> None:
        super().__init__()
        channels = 2 * growth
        # No batch norm here, since every layer begins with one.
        layers: list[nn.Module] = [nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)]
        for block, count in enumerate(blocks):
            if block:
                layers.append(nn.Sequential(*activated_conv(channels, channels // 2, 1), nn.AvgPool2d(2)))
                channels //= 2
            for _ in range(count):
                layers.append(DenseLayer(channels, growth))
                channels += growth
        layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # Fan in, by He et al. (https://arxiv.org/abs/1502.01852), as in the paper.
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def densenet121(num_classes: int = 10, in_channels: int = 3) -> DenseNet:
    """6,956,298 parameters in 362 tensors at 3 input channels and 10 classes."""
    return DenseNet((6, 12, 24, 16), num_classes=num_classes, in_channels=in_channels)


def densenet169(num_classes: int = 10, in_channels: int = 3) -> DenseNet:
    """12,493,322 parameters in 506 tensors at 3 input channels and 10 classes."""
    return DenseNet((6, 12, 32, 32), num_classes=num_classes, in_channels=in_channels)
