#!/usr/bin/env bash
# Trains ResNet-50 on ImageNet with one algorithm. The other scripts of this folder pass the first arguments:
#
#   run.sh ar|sgp|osgp|dpsgd|adpsgd TOPOLOGY|none    [further config files] [further arguments of train.py]
#
#   TOPOLOGY     another file of configs/topology: TOPOLOGY=ring
#   EXPERIMENT   another experiment: EXPERIMENT=configs/digits/cnn.py
#   LAUNCH       mpirun, horovodrun or slurm; default: slurm inside a SLURM job, otherwise mpirun
#
# HOSTS, RANKS, NETWORK, INTERFACE, MPI_OPTIONS and DRY_RUN are described in scripts/common.sh, REQUEUE in
# scripts/slurm.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 2; }

algorithm=$1 default=$2
shift 2
topology=${TOPOLOGY:-$default}
words=(--configs "${EXPERIMENT:-configs/imagenet/resnet50.py}" "configs/gossip/$algorithm.py")
if [ "$default" != none ]; then
    words+=("configs/topology/$topology.py")
elif [ "$topology" != none ]; then
    die "TOPOLOGY is $topology, but $algorithm averages over all ranks and has none"
fi
# slurm.sh sets HOSTS, so a script that it starts uses mpirun.
if [ -n "${SLURM_JOB_NODELIST:-}" ] && [ -z "${HOSTS:-}${RANKS:-}" ]; then found=slurm; fi
launch=${LAUNCH:-${found:-mpirun}}
case $launch in
    mpirun | horovodrun | slurm) exec bash "$here/../$launch.sh" "${words[@]}" "$@" ;;
    *) die "LAUNCH is $launch; it must be mpirun, horovodrun or slurm" ;;
esac
