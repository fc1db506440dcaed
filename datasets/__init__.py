"""Data sets: each is a mapping from split name ('train', 'test', ...) to a `torch.utils.data.Dataset`."""

from datasets.digits import Digits as Digits
