"""Runs scripts of examples/ one after another in each rank, as their commands do, and writes how they end."""

import json
import os
import runpy
import sys
import warnings
from hashlib import sha256
from pathlib import Path

import dgc_datasets.torchvision_compat  # noqa: F401  (Lightning and transformers import torchvision)
from dgc.launch import started_by

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # as python does for a script
warnings.filterwarnings("default", module=r"(lightning|transformers|accelerate)\.")  # they warn of their own code
out, runs = sys.argv[1:]
found = []
for script, *arguments in json.loads(runs):
    sys.argv = [script, *arguments]
    end = runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    # with SGP each rank has a model of its own; with FSDP2 each rank has shards
    state = end.get("final") or dict(end["model"].named_parameters())
    shards = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in state.values()]
    digest = sha256(b"".join(shard.detach().numpy().tobytes() for shard in shards)).hexdigest()
    found.append({"losses": end["losses"], "accuracy": end["accuracy"], "state": digest})
started = started_by(os.environ)
assert started is not None
Path(out, f"rank{started.rank}.json").write_text(json.dumps(found))
