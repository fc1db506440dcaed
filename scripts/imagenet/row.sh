#!/usr/bin/env bash
# One row of the accuracy table of docs/experiments.md; the scripts beside this one fill in its first words:
#
#   row.sh RANKS PASSES multistep|cosine dgc|dense    resnet50|vgg16_bn [further words for train.py]
#
# A rank stands for a sparsified node: where nodes have several GPUs that exchange dense gradients among
# themselves, PASSES backward passes per step stand for these GPUs. HOSTS, MPI_OPTIONS and DRY_RUN are
# described in scripts/common.sh; LAUNCH=horovodrun starts the ranks with horovodrun in place of mpirun.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 2; }

RANKS=$1 passes=$2 schedule=$3 compression=$4 model=${5:-}
export RANKS
case $model in
    resnet18 | resnet50 | vgg16_bn) shift 5 ;;
    *) die "which model? resnet50 or vgg16_bn, then further words for train.py" ;;
esac
case ${LAUNCH:=mpirun} in
    mpirun | horovodrun) ;;
    *) die "LAUNCH is $LAUNCH; it must be mpirun or horovodrun" ;;
esac

words=(--configs "configs/imagenet/$model.py")
if [ "$schedule" = cosine ]; then words+=(configs/imagenet/cosine.py); fi
if [ "$compression" = dgc ]; then words+=(configs/dgc/wm0.py); fi
if [ "$passes" != 1 ]; then
    words+=("--configs.train.num_batches_per_step" "$passes" --suffix ".passes$passes")
fi
exec bash "$here/../$LAUNCH.sh" "${words[@]}" "$@"
