"""The build backend: setuptools' own, which also asks for Zig where setup.py compiles with it."""

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

ZIG = "ziglang==0.17.1"


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    has_zig = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    is_portable = Path("PKG-INFO").exists() or not shutil.which("c++")
    is_asked = not os.environ.get("CXX") and os.environ.get("DGC_NATIVE") != "0"
    zig = [ZIG] if has_zig and is_portable and is_asked else []
    return [*build_meta.get_requires_for_build_wheel(config_settings), *zig]
