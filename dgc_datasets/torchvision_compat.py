"""Lets `import torchvision` work beside a torch that its compiled operators do not fit.

A torchvision wheel built for CUDA cannot load its operators beside a CPU-only torch. It accepts that, but
then describes two of them that do not exist and its import fails with "operator torchvision::nms does not
exist". Declaring those two schemas first cures it; the operators themselves stay absent, which only detection
models notice.

Importing this module is enough: it watches for the first import of torchvision, whoever makes it (a config
file, an import path in a config, a loader's worker), and costs nothing where there is none.
"""

import glob
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# torch forgets the declarations when the library object goes.
_declared: list[torch.library.Library] = []


def operators_load() -> bool:
    """Whether torchvision's compiled operators fit this torch; tried as torchvision does, without importing
    it.
    """
    spec = importlib.util.find_spec("torchvision")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for path in [path for folder in folders for path in glob.glob(os.path.join(folder, "_C*.so"))]:
        try:
            torch.ops.load_library(path)
        except OSError:
            continue
        return True
    return False


def declare_missing_operators() -> list[str]:
    """Declares what torchvision would miss; returns the names declared, none where nothing is missing."""
    if "torchvision" in sys.modules or _declared:
        return []
    if importlib.util.find_spec("torchvision") is None or operators_load():
        return []
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS.values():
        library.define(schema)
    _declared.append(library)
    return list(SCHEMAS)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds no module; is only asked, as every finder is, before torchvision is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            declare_missing_operators()
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
