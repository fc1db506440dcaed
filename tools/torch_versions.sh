#!/usr/bin/env bash
# Runs the tests of the adapters on other versions of torch, each in an environment of its own:
#     bash tools/torch_versions.sh 2.4.1 2.15.0
# The environments stay in $TORCH_VENVS, by default ~/.cache/dgc/torch; a CUDA build takes 6 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${TORCH_VENVS:-$HOME/.cache/dgc/torch}
export OMP_NUM_THREADS=1
"${PYTHON:-python3}" dgc/kernels/build.py  # without its kernels the library warns, which fails tests
for version in "$@"; do
    python=$folder/$version/bin/python
    if [ ! -f "$folder/$version/.ready" ]; then
        "${PYTHON:-python3}" -m venv "$folder/$version"
        "$python" -m pip install --quiet --disable-pip-version-check "torch==$version" "numpy<2.3" jaxtyping==0.3.7 \
            beartype omegaconf simpleeval==1.0.8 pyyaml tqdm tensorboard scikit-learn pytest==9.0.3 \
            pytest-timeout==2.4.0 pytest-xdist==3.8.0
        touch "$folder/$version/.ready"
    fi
    echo "torch $version"
    older=$([ "$(printf '%s\n' 2.13 "$version" | sort -V | head -1)" = 2.13 ] || echo yes)
    # DDP of torch before 2.13 itself cannot broadcast complex parameters over Gloo (docs/torch.md)
    "$python" -m pytest -q tests/ddp tests/engine tests/optim tests/parallel/test_ddp.py \
        -k "${older:+not other_kinds_of_parameters}"
    if [ -z "$older" ]; then  # the oldest of dgc.fsdp is 2.13
        "$python" -m pytest -q tests/fsdp tests/parallel/test_fsdp*.py
    fi
done
