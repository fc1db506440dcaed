"""Residual networks for small images: He et al., Deep Residual Learning for Image Recognition, section 4.2.

https://arxiv.org/abs/1512.03385. Depth 6n+2: a 3x3 convolution, three stages of n blocks with 16, 32 and 64
channels, global average pooling, one linear layer. Shortcuts are the paper's option A: if a stage changes the
size, the shortcut takes every second pixel of the input and pads the channels with zeros. It has no parameters.

ResNet-18, 50 and 101 are the ImageNet networks of the paper's table 1, for small images: a 3x3 convolution with 64
channels instead of the 7x7 one and its pooling, four stages, and shortcuts of option B. ResNet-18 has two basic
blocks in each stage, with 64 to 512 channels. ResNet-50 and 101 have bottleneck blocks, with 256 to 2048 channels.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class Shortcut(nn.Module):
    """Option A: subsample by `stride`, pad the channels with zeros on both sides."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (out_channels - in_channels) // 2
        self.after = out_channels - in_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.before, self.after))


class Projection(nn.Sequential):
    """Option B: a 1x1 convolution with batch norm."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
        )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to the shortcut."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        resize: Callable[[int, int, int], nn.Module] = Shortcut,
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        same = stride == 1 and in_channels == out_channels
        self.shortcut: nn.Module = nn.Identity() if same else resize(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norm, added to the shortcut. Inner width: a quarter."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        resize: Callable[[int, int, int], nn.Module] = Projection,
    ) -> None:
        super().__init__()
        width = out_channels // 4
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            # The 3x3 convolution has the stride, as in most implementations. In the first 1x1 convolution, as in
            # the paper, it would skip three quarters of the pixels.
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        same = stride == 1 and in_channels == out_channels
        self.shortcut: nn.Module = nn.Identity() if same else resize(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Input [n, in_channels, h, w], h and w at least 4 (32 in the paper); output logits [n, num_classes].

    Args:
        stages: channels of each stage. Every stage except the first halves the image.
        blocks: number of blocks of each stage, or one number for all stages.
        resize: builds the shortcut of a block that changes the size, from (channels before, channels after,
        stride). block: class of the blocks. stem: channels of the first convolution; None: as in the first
        stage.
    """

    def __init__(
        self,
        stages: tuple[int, ...],
        blocks: int | tuple[int, ...],
        resize: Callable[[int, int, int], nn.Module],
        num_classes: int = 10,
        in_channels: int = 3,
        block: type[BasicBlock] | type[Bottleneck] = BasicBlock,
        stem: int | None = None,
    ) -> None:
        super().__init__()
        counts = (blocks,) * len(stages) if isinstance(blocks, int) else blocks
        channels = stages[0] if stem is None else stem
        layers: list[nn.Module] = [
            nn.Conv2d(in_channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        ]
        for stage, (stage_channels, count) in enumerate(zip(stages, counts, strict=True)):
            for index in range(count):
                stride = 2 if stage and index == 0 else 1
                layers.append(block(channels, stage_channels, stride, resize))
                channels = stage_channels
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def resnet_of_depth(depth: int, num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """The paper's family for CIFAR: depth 6n+2, n blocks in each of three stages."""
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth is {depth}; it must be 6n+2 with n at least 1")
    return ResNet((16, 32, 64), (depth - 2) // 6, Shortcut, num_classes, in_channels)


def resnet20(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """269,722 parameters in 59 tensors at 3 input channels and 10 classes."""
    return resnet_of_depth(20, num_classes, in_channels)


def resnet56(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """853,018 parameters in 167 tensors at 3 input channels and 10 classes."""
    return resnet_of_depth(56, num_classes, in_channels)


def resnet110(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """1,727,962 parameters in 329 tensors at 3 input channels and 10 classes."""
    return resnet_of_depth(110, num_classes, in_channels)


def resnet18(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """11,173,962 parameters in 62 tensors at 3 input channels and 10 classes."""
    return ResNet((64, 128, 256, 512), 2, Projection, num_classes, in_channels)


def resnet50(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """23,520,842 parameters in 161 tensors at 3 input channels and 10 classes."""
    stages, blocks = (256, 512, 1024, 2048), (3, 4, 6, 3)
    return ResNet(stages, blocks, Projection, num_classes, in_channels, Bottleneck, stem=64)


def resnet101(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """42,512,970 parameters in 314 tensors at 3 input channels and 10 classes."""
    stages, blocks = (256, 512, 1024, 2048), (3, 4, 23, 3)
    return ResNet(stages, blocks, Projection, num_classes, in_channels, Bottleneck, stem=64)
