#!/usr/bin/env bash
#SBATCH --job-name=dgc
#SBATCH --signal=B:USR1@300
# Trains as a SLURM job, submitted from the repository's root, with one task per rank:
#
#   sbatch --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 scripts/slurm.sh \
#       --configs configs/imagenet/resnet50.py configs/dgc/wm0.py
#   sbatch --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 scripts/slurm.sh scripts/imagenet/batch1024.sh resnet50
#
# mpirun starts the ranks, through SLURM where the MPI was built with it (make setup SYSTEM_MPI=1), else through
# ssh. 5 minutes before the time is up, the job is told to save and end; submit it again, and it goes on.
set -euo pipefail
die() { printf 'slurm.sh: %s\n' "$*" >&2; exit 2; }

[ -n "${SLURM_JOB_NODELIST:-}" ] || die "this is no SLURM job; submit it with sbatch, or use scripts/mpirun.sh"
# SLURM runs a copy of this file, so its own place says nothing.
cd "${SLURM_SUBMIT_DIR:-.}"
[ -f scripts/mpirun.sh ] || die "submit the job from the repository's root, not from $PWD"
ranks=${SLURM_NTASKS_PER_NODE:-$((${SLURM_NTASKS:-1} / ${SLURM_JOB_NUM_NODES:-1}))}
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$ranks/" | paste -sd,)
export HOSTS
case ${1:-} in
    *.sh) exec bash "$@" ;;
    *) exec bash scripts/mpirun.sh "$@" ;;
esac
