#!/usr/bin/env bash
#SBATCH --job-name=dgc
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
# Trains as a SLURM job, submitted from the repository's root, with one task per rank:
#
#   sbatch --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 scripts/slurm.sh \
#       --configs configs/imagenet/resnet50.py configs/dgc/wm0.py
#   sbatch --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 scripts/slurm.sh scripts/imagenet/batch1024.sh resnet50
#
# mpirun starts the ranks, through SLURM where the MPI was built with it (make setup SYSTEM_MPI=1), else through
# ssh. 5 minutes before the time is up (SIGUSR1), or on SIGTERM, the ranks are told to save and end, and the job
# puts itself into the queue again, where it goes on.
#
#   DRY_RUN=1    prints the command and starts nothing, outside of SLURM too; HOSTS or RANKS then say for which
#                machines (scripts/common.sh)
#   REQUEUE      what is called with the job's number then; default: scontrol requeue; empty: nothing is
set -euo pipefail
die() { printf 'slurm.sh: %s\n' "$*" >&2; exit 2; }

if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    # SLURM runs a copy of this file, so its own place says nothing.
    cd "${SLURM_SUBMIT_DIR:-.}"
    [ -f scripts/mpirun.sh ] || die "submit the job from the repository's root, not from $PWD"
    ranks=${SLURM_NTASKS_PER_NODE:-$((${SLURM_NTASKS:-1} / ${SLURM_JOB_NUM_NODES:-1}))}
    HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$ranks/" | paste -sd,)
elif [ -n "${DRY_RUN:-}" ]; then
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    HOSTS=${HOSTS:-node1:${RANKS:-1}}
    echo "slurm.sh: this is not a SLURM job; $HOSTS stands for the machines that SLURM would give" >&2
else
    die "this is no SLURM job; submit it with sbatch, or use scripts/mpirun.sh"
fi
export HOSTS
read -ra requeue <<<"${REQUEUE-scontrol requeue}"
# train.py's exit status where it was asked to end, and has saved
readonly saved=75

signals=0
ask() {
    signals=$((signals + 1))
    [ -n "${!:-}" ] || exit 143
    # Once: a rank that has saved and is leaving takes a second one for the order to leave at once.
    if [ "$signals" = 1 ]; then kill -USR1 "$!" 2>/dev/null || true; fi
}
trap ask USR1 TERM

# In the background, because bash runs a trap only when the command before it has ended, or in `wait`. Every
# script from here on becomes the next with exec, so that this process is mpirun itself.
case ${1:-} in
    *.sh) bash "$@" & ;;
    *) bash scripts/mpirun.sh "$@" & ;;
esac
status=0
while
    seen=$signals
    wait "$!" && status=0 || status=$?
    # A signal ends `wait`, whose status is then not that of the run.
    [ "$signals" != "$seen" ]
do :; done

if [ "$status" = "$saved" ] && [ ${#requeue[@]} -gt 0 ]; then
    # SLURM ends this script while it takes the job back.
    trap '' USR1 TERM
    echo "slurm.sh: saved; ${requeue[*]} ${SLURM_JOB_ID:-}"
    if "${requeue[@]}" "${SLURM_JOB_ID:-}"; then exit 0; fi
    echo "slurm.sh: that failed; submit the job again, and it goes on" >&2
fi
exit "$status"
