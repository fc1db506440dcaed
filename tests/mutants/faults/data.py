"""Faults of models and data sets."""

from ..fault import Fault

DATA = [
    Fault(
        "test-images-among-the-training-images",
        "dgc_datasets/digits.py",
        "train = [index for other, members in enumerate(folds) if other != fold for index in members]",
        "train = [index for other, members in enumerate(folds) for index in members]",
        [
            "tests/test_datasets.py::test_every_image_is_tested_once_over_the_folds",
            "tests/test_datasets.py::test_folds_are_stratified_and_fixed",
        ],
    ),
    Fault(
        "held-out-images-stay-in-training",
        "dgc_datasets/cifar.py",
        "train = np.setdiff1d(np.arange(len(labels)), kept)",
        "train = np.arange(len(labels))",
        ["tests/test_image_datasets.py::test_a_part_of_the_training_images_is_held_out"],
    ),
    Fault(
        "images-transposed",
        "dgc_datasets/cifar.py",
        "pixels.transpose(0, 2, 3, 1)",
        "pixels.transpose(0, 3, 2, 1)",
        ["tests/test_image_datasets.py::test_cifar_pixels_are_where_torchvision_has_them"],
    ),
    Fault(
        "test-images-augmented",
        "dgc_datasets/cifar.py",
        "plain = normalized([transforms.Resize(image_size)], MEAN, STD)",
        "plain = augmented",
        ["tests/test_image_datasets.py::test_training_images_are_shifted_and_flipped_test_images_are_not"],
    ),
    Fault(
        "first-stage-halves-the-image",
        "dgc_models/resnet_cifar.py",
        "stride = 2 if stage and index == 0 else 1",
        "stride = 2 if index == 0 else 1",
        [
            "tests/test_models.py::test_cifar_resnet_shapes",
            "tests/test_models.py::test_all_stages_but_the_first_halve_the_image",
        ],
    ),
    Fault(
        "shortcut-from-the-activated-input",
        "dgc_models/senet_cifar.py",
        "shortcut = x if self.projection is None",
        "shortcut = activated if self.projection is None",
        ["tests/test_models.py::test_pre_activation_blocks_pass_their_input_on_untouched"],
    ),
    Fault(
        "dense-layer-changes-what-it-reads",
        "dgc_models/densenet_cifar.py",
        "return torch.cat([x, self.body(x)], dim=1)",
        "return torch.cat([torch.relu(x), self.body(x)], dim=1)",
        ["tests/test_models.py::test_dense_layers_keep_what_they_read"],
    ),
]
