#!/usr/bin/env bash
#SBATCH --job-name=osgp
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
# Overlap SGP: a push-sum round overlaps with the computation of the next step. Variables: run.sh.
here=$(dirname "${BASH_SOURCE[0]}")
# SLURM runs a copy of this file.
if [ ! -f "$here/run.sh" ]; then here=${SLURM_SUBMIT_DIR:-.}/scripts/gossip; fi
exec bash "$here/run.sh" osgp n_peer_exponential "$@"
