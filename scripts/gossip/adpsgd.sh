#!/usr/bin/env bash
#SBATCH --job-name=adpsgd
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
# AD-PSGD: pairs of ranks average their models asynchronously. Variables: run.sh.
here=$(dirname "${BASH_SOURCE[0]}")
# SLURM runs a copy of this file.
if [ ! -f "$here/run.sh" ]; then here=${SLURM_SUBMIT_DIR:-.}/scripts/gossip; fi
exec bash "$here/run.sh" adpsgd bipartite_exponential "$@"
