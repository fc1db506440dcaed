"""Data and model of the examples: handwritten digits from scikit-learn and a small convolutional network."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = 32  # images per rank and step


def images_and_labels() -> tuple[Tensor, Tensor]:
    """1797 images float32 [n, 1, 8, 8] and their labels int64 [n], in an order that is the same on every rank."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 8 - 0.6  # about zero mean
    return images[order], torch.from_numpy(data.target)[order]


class Digits:
    """This rank's share of 1437 training images, and all 360 test images."""

    def __init__(self, rank: int, size: int):
        images, labels = images_and_labels()
        train = TensorDataset(images[360:], labels[360:])
        self.sampler: DistributedSampler[Tensor] = DistributedSampler(train, size, rank)
        self.loader = DataLoader(train, BATCH_SIZE, sampler=self.sampler)
        self.test_images, self.test_labels = images[:360], labels[:360]

    def epoch(self, epoch: int) -> DataLoader[tuple[Tensor, ...]]:
        """Batches (images, labels), in another order in each epoch."""
        self.sampler.set_epoch(epoch)
        return self.loader

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Correct test images in percent."""
        correct = model(self.test_images).argmax(1) == self.test_labels
        return 100 * float(correct.float().mean())


def network() -> nn.Module:
    """38,282 parameters, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
