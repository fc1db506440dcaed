"""VGG-16 with batch norm for small images: Simonyan and Zisserman, https://arxiv.org/abs/1409.1556, column D.

The thirteen convolutions are the paper's. Its three linear layers, made for 7x7 features, are one here: a 32x32
image is a single position with 512 channels after the fifth pooling.
"""

from torch import Tensor, nn

# Channels of each 3x3 convolution, stage by stage; each stage ends with a 2x2 pooling.
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG16BN(nn.Module):
    """Input [n, in_channels, h, w], h and w at least 32; output logits [n, num_classes].

    14,728,266 parameters in 54 tensors at 3 input channels and 10 classes.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for stage in STAGES:
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


def vgg16_bn(num_classes: int = 10, in_channels: int = 3) -> VGG16BN:
    """14,728,266 parameters at 3 input channels and 10 classes."""
    return VGG16BN(num_classes, in_channels)
