"""Makes `import torchvision` work if its compiled operators do not match the installed torch.

A torchvision wheel built for CUDA cannot load its operators with a CPU-only torch. It tolerates that, but then it
registers fake implementations of two missing operators, and its import fails with "operator torchvision::nms does
not exist". Declaring the schemas of these two operators first avoids the error. The operators themselves are still
missing, which affects only detection models.

Importing this module is enough. It detects the first import of torchvision anywhere (in a config file, by an
import path in a config, in a loader's worker) and costs nothing if torchvision is not imported. `make setup` has
every program of its environment import it, if torchvision fails there:

    python dgc_datasets/torchvision_compat.py     copies this file into the environment, or removes the copy
"""

import glob
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
COPY = "dgc_torchvision_compat"
# torch removes the declarations when the library object is deleted.
_declared: list[Any] = []


def operators_load() -> bool:
    """Whether torchvision's compiled operators match this torch. Tests it without importing torchvision."""
    import torch

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
    import torch  # not with this module, which every program of an environment may import

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


def install(folder: Path) -> bool:
    """Has all programs that use a site-packages declare the operators. Returns whether torchvision needs it."""
    import subprocess  # not with this module, since it takes time

    copy, start = folder / f"{COPY}.py", folder / f"{COPY}.pth"
    for file in (start, copy):
        file.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False
    )
    if "torchvision::nms" not in done.stderr:
        return False
    copy.write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    start.write_text(f"import {COPY}\n", encoding="utf-8")
    return True


if __name__ == "__main__":
    import sysconfig

    if install(Path(sysconfig.get_path("purelib"))):
        words = "torchvision is built for another torch. It can be imported now, without the operators of"
        print(f"{words} detection models: there is nothing to do")
else:
    # in the place of the finder of the environment's copy
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != _BeforeTorchvision.__name__]
    sys.meta_path.insert(0, _BeforeTorchvision())
