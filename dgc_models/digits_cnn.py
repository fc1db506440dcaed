"""A plain convolutional network for 8x8 grey images."""

from torch import Tensor, nn


def _stage(in_channels: int, out_channels: int) -> list[nn.Module]:
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]


class DigitsCNN(nn.Module):
    """Three 3x3 convolutions (width, 2*width, 4*width channels) with batch norm, then two linear layers.

    The default width 32 has 226,794 parameters. Input float [n, 1, 8, 8], output logits [n, num_classes].
    """

    def __init__(self, num_classes: int = 10, width: int = 32) -> None:
        super().__init__()
        for name, value in (("num_classes", num_classes), ("width", width)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.features = nn.Sequential(
            *_stage(1, width),
            *_stage(width, 2 * width),
            nn.MaxPool2d(2),
            *_stage(2 * width, 4 * width),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(4 * width * 2 * 2, 8 * width),
            nn.ReLU(inplace=True),
            nn.Linear(8 * width, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits
