"""Makes `import torchvision` work if its compiled operators do not match the installed torch.

A torchvision wheel built for CUDA cannot load its operators with a CPU-only torch. It tolerates that, but then it
registers fake implementations of two missing operators, and its import fails with "operator torchvision::nms does
not exist". Declaring the schemas of these two operators first avoids the error. The operators themselves are still
missing, which affects only detection models.

Importing this module is enough. It detects the first import of torchvision anywhere (in a config file, by an
import path in a config, in a loader's worker) and costs nothing if torchvision is not imported.
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
# torch removes the declarations when the library object is deleted.
_declared: list[torch.library.Library] = []


def operators_load() -> bool:
    """Whether torchvision's compiled operators match this torch. Tests it without importing torchvision."""
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
    """Declares the operators that torchvision would miss, and returns their names."""
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
    """Import finder that finds no module. Python calls it before torchvision is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            declare_missing_operators()
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
