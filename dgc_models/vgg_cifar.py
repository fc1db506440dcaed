"""VGG with batch norm for small images: Simonyan and Zisserman, https://arxiv.org/abs/1409.1556, columns D and E.

The thirteen or sixteen convolutions are the paper's. One linear layer replaces the paper's three for 7x7
features, since a 32x32 image is reduced to a single position with 512 channels by the fifth pooling.
"""

from torch import Tensor, nn

# Channels of each 3x3 convolution, stage by stage; each stage ends with a 2x2 pooling.
COLUMN_D = ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3)
COLUMN_E = ((64,) * 2, (128,) * 2, (256,) * 4, (512,) * 4, (512,) * 4)


class VGGBN(nn.Module):
    """Input [n, in_channels, h, w], h and w at least 32; output logits [n, num_classes].

    Args:
        stages: for each stage, the channels of its convolutions. Every stage halves the image.
    """

    def __init__(self, stages: tuple[tuple[int, ...], ...], num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for stage in stages:
            for wide in stage:
                layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(inplace=True)]
                channels = wide
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def vgg16_bn(num_classes: int = 10, in_channels: int = 3) -> VGGBN:
    """14,728,266 parameters in 54 tensors at 3 input channels and 10 classes."""
    return VGGBN(COLUMN_D, num_classes, in_channels)


def vgg19_bn(num_classes: int = 10, in_channels: int = 3) -> VGGBN:
    """20,040,522 parameters in 66 tensors at 3 input channels and 10 classes."""
    return VGGBN(COLUMN_E, num_classes, in_channels)
