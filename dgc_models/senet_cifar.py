"""Squeeze-and-excitation networks for small images: Hu et al., https://arxiv.org/abs/1709.01507.

SENet-18 is ResNet-18 with the pre-activation blocks of He et al., Identity Mappings in Deep Residual Networks
(https://arxiv.org/abs/1603.05027). The residual of each block is scaled by channel before it is added. As in
ResNet-18 for small images, a 3x3 convolution with batch norm replaces the 7x7 one and its pooling. Unlike in the
paper on pre-activation, there is no batch norm after the last block.
"""

from torch import Tensor, nn


class SqueezeExcitation(nn.Module):
    """Scales each channel by a factor in (0, 1) that is computed from the image means of all channels."""

    def __init__(self, channels: int, ratio: int = 16) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, channels // ratio, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels // ratio, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = x * self.gate(x)
        return scaled


class PreActivationBlock(nn.Module):
    """Batch norm and ReLU before each of two 3x3 convolutions; their scaled output is added to the shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.activation = nn.Sequential(nn.BatchNorm2d(in_channels), nn.ReLU(inplace=True))
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            SqueezeExcitation(out_channels),
        )
        self.projection: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.projection = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = self.activation(x)
        # A projection has the same input as the convolutions. Without one, the shortcut is the block's input.
        shortcut = x if self.projection is None else self.projection(activated)
        added: Tensor = self.body(activated) + shortcut
        return added


class SENet(nn.Module):
    """Input [n, in_channels, h, w], h and w at least 4; output logits [n, num_classes].

    Args:
        stages: channels of each stage. Every stage except the first halves the image.
        blocks: number of blocks of each stage.
    """

    def __init__(self, stages: tuple[int, ...], blocks: int, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        channels = stages[0]
        layers: list[nn.Module] = [
            nn.Conv2d(in_channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        ]
        for stage, stage_channels in enumerate(stages):
            for block in range(blocks):
                layers.append(PreActivationBlock(channels, stage_channels, 2 if stage and block == 0 else 1))
                channels = stage_channels
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # Fan in, because no batch norm follows the convolutions of the gates and the projections.
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def senet18(num_classes: int = 10, in_channels: int = 3) -> SENet:
    """11,260,354 parameters in 88 tensors at 3 input channels and 10 classes."""
    return SENet((64, 128, 256, 512), 2, num_classes, in_channels)
