"""ImageNet (ILSVRC 2012), or any images in class folders, with random crops in training.

    ROOT/train/n01440764/n01440764_10026.JPEG      ROOT/val/n01440764/ILSVRC2012_val_00000293.JPEG

The classes are the folders of ROOT/train in alphabetical order, which gives the usual numbering for ImageNet.
"""

import warnings
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from dgc_datasets.images import ImageFiles, held_out, normalized

# Of ImageNet's training images, per channel.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Edge of the central crop of a test image, as a share of the image's shorter edge.
CENTRE = 0.875
WHERE = (
    "Make ROOT/train/CLASS/*.JPEG and ROOT/val/CLASS/*.JPEG, one folder per class, and name ROOT with "
    "--configs.dataset.root"
)

# A few files of ImageNet have an intact image but damaged camera data.
warnings.filterwarnings("ignore", "(Possibly )?[Cc]orrupt EXIF data", UserWarning)


class ImageNet(dict[str, Dataset[Any]]):
    """{'train', 'test'}, and 'val' with a val_ratio: items are (image float32 [3, size, size], label).

    Args:
        num_classes: number of classes. If there are more folders, every (folders // num_classes)-th one is used.
        val_ratio: the share of the training images that is held out for validation. 'test' has the images of
            ROOT/val.

    Raises:
        ValueError: with a remedy, if folders are missing or do not match.
    """

    def __init__(
        self,
        root: str = "data/imagenet",
        num_classes: int = 1000,
        image_size: int = 224,
        val_ratio: float | None = None,
    ) -> None:
        from torchvision import transforms  # slow to import, so only where it is used

        if image_size < 1:
            raise ValueError(f"dataset.image_size is {image_size}; it must be at least 1")
        place = Path(root).expanduser()
        classes = chosen_classes(place, num_classes)
        crops = [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip()]
        augmented = normalized(crops, MEAN, STD)
        centre = [transforms.Resize(int(image_size / CENTRE)), transforms.CenterCrop(image_size)]
        plain = normalized(centre, MEAN, STD)
        images = find_images(place / "train", classes)
        kept = set(held_out([label for _, label in images], val_ratio))
        train = [image for index, image in enumerate(images) if index not in kept]
        super().__init__(train=ImageFiles(train, augmented))
        if kept:
            self["val"] = ImageFiles([images[index] for index in sorted(kept)], plain)
        self["test"] = ImageFiles(find_images(place / "val", classes), plain)


def chosen_classes(root: Path, num_classes: int) -> dict[str, int]:
    """{folder name: label} of the classes to train on."""
    for folder in (root / "train", root / "val"):
        if not folder.is_dir():
            raise ValueError(f"the data set is not there: {folder} is no folder. {WHERE}")
    names, others = (
        sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        for folder in (root / "train", root / "val")
    )
    if not names:
        raise ValueError(f"{root / 'train'} has no class folders. {WHERE}")
    if not 1 <= num_classes <= len(names):
        raise ValueError(
            f"{root / 'train'} has {len(names)} class folders, but dataset.num_classes is {num_classes}"
        )
    if differing := sorted(set(names) ^ set(others)):
        raise ValueError(
            f"{root / 'train'} and {root / 'val'} have not the same classes: {', '.join(differing[:3])}"
            f"{' and others' if len(differing) > 3 else ''} in one of them only. {WHERE}"
        )
    stride = len(names) // num_classes
    return {name: label for label, name in enumerate(names[::stride][:num_classes])}


def find_images(folder: Path, classes: dict[str, int]) -> list[tuple[str, int]]:
    """(path, label) of all images, sorted by path. Raises ValueError for a class without images."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    try:
        return make_dataset(str(folder), classes, extensions=IMG_EXTENSIONS)
    except FileNotFoundError as error:  # a class without images
        raise ValueError(f"{folder}: {error}") from error
