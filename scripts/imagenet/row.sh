#!/usr/bin/env bash
# Trains one row of the accuracy table of docs/experiments.md. The other scripts pass the first arguments:
#
#   row.sh RANKS PASSES multistep|cosine dgc|dense    resnet50|vgg16_bn [further arguments of train.py]
#
# A rank represents a node that sends sparse gradients. PASSES backward passes per step represent the GPUs of the
# node, which exchange dense gradients. HOSTS, MPI_OPTIONS and DRY_RUN are
# described in scripts/common.sh; LAUNCH=horovodrun starts the ranks with horovodrun instead of mpirun.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 2; }

RANKS=$1 passes=$2 schedule=$3 compression=$4 model=${5:-}
export RANKS
case $model in
    resnet18 | resnet50 | vgg16_bn) shift 5 ;;
    *) die "the first argument must be a model: resnet18, resnet50 or vgg16_bn" ;;
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
