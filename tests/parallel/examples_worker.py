"""Runs scripts of examples/ one after another in each rank, as their command does, and writes what they end with.

mpirun -np 2 python tests/parallel/examples_worker.py OUT EPOCHS SCRIPT..
"""

import json
import runpy
import sys
from hashlib import sha256
from pathlib import Path

import horovod.torch as hvd

out, epochs, *scripts = sys.argv[1:]
sys.path.insert(0, str(Path(scripts[0]).parent))  # as python does for a script
found = {}
for script in scripts:
    sys.argv = [script, epochs]
    end = runpy.run_path(script, run_name="__main__")
    parameters = dict(end["model"].named_parameters())
    state = end.get("final", parameters)
    found[Path(script).stem] = {
        "losses": end["losses"],
        "accuracy": end["data"].accuracy(end["model"]),
        "state": sha256(b"".join(state[name].detach().numpy().tobytes() for name in parameters)).hexdigest(),
    }
Path(out, f"rank{hvd.rank()}.json").write_text(json.dumps(found))
