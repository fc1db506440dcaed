"""Data sets: each is a mapping from split name ('train', 'test', ...) to a `torch.utils.data.Dataset`.

Images are tensors [channels, height, width], float32 and normalized; labels are class numbers from 0. Language
data is a mapping from split name to token ids, [n] of an integer type.
"""

from dgc_datasets import torchvision_compat as torchvision_compat
from dgc_datasets.cifar import CIFAR as CIFAR
from dgc_datasets.digits import Digits as Digits
from dgc_datasets.imagenet import ImageNet as ImageNet
from dgc_datasets.package_sources import PackageSources as PackageSources
from dgc_datasets.python_sources import PythonSources as PythonSources
from dgc_datasets.wikitext import WikiText2 as WikiText2
