"""The demonstration: four ranks train on handwritten digits, DGC sends 0.1 % of the gradient.

`make demo` runs it from the start each time, into runs/demo. Further words go to train.py:

    python -m scripts.demo --configs.train.num_epochs 20
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from scripts.launch import replace_process

RANKS = 4
RUN = Path("runs/demo")
CONFIGS = ("configs/digits/cnn.py", "configs/dgc/wm5.py", "configs/dgc/fp16.py", "configs/dgc/int32.py")

if __name__ == "__main__":
    shutil.rmtree(RUN, ignore_errors=True)  # an earlier demonstration's curves would mix with the new ones
    words = ["train.py", "--configs", *CONFIGS, "--devices", "cpu", "--run-dir", str(RUN), *sys.argv[1:]]
    replace_process(RANKS, words)
