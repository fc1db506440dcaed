"""AlexNet for small images: Krizhevsky, Sutskever and Hinton, ImageNet Classification with Deep CNNs, NIPS 2012.

The five convolutions are from the single-tower version (Krizhevsky, https://arxiv.org/abs/1404.5997), without
local response normalisation, and with 2x2 pooling instead of overlapping 3x3 pooling. One linear layer replaces
the three for 6x6 features, since a 32x32 image is reduced to a single position with 256 channels.
"""

from torch import Tensor, nn


class AlexNet(nn.Module):
    """AlexNet. Input [n, in_channels, h, w], h and w at least 32; output logits [n, num_classes]."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 64, 11, stride=4, padding=5),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(256, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # The features are not normalised, so the initialization must keep their scale: fan in. PyTorch's
                # default shrinks them in each layer, until the logits hardly depend on the image.
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def alexnet(num_classes: int = 10, in_channels: int = 3) -> AlexNet:
    """2,472,266 parameters in 12 tensors at 3 input channels and 10 classes."""
    return AlexNet(num_classes, in_channels)
