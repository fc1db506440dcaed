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
# mpirun starts the ranks, through SLURM if the MPI was built with it (make setup SYSTEM_MPI=1), otherwise through
# ssh. 5 minutes before the time limit (SIGUSR1), or on SIGTERM, the ranks save and stop, and the job requeues
# itself. The requeued job resumes.
#
# With ELASTIC=1 the job goes on after a rank or a machine is lost (scripts/torchrun.sh, docs/elastic.md). srun then
# starts one torchrun per machine, over torch.distributed. --no-kill keeps the job when a machine fails:
#
#   ELASTIC=1 sbatch --no-kill --nodes 4 --ntasks-per-node 8 scripts/slurm.sh --configs configs/imagenet/resnet50.py
#
#   DRY_RUN=1    prints the command and starts nothing, also outside of SLURM; HOSTS or RANKS then set the
#                machines (scripts/common.sh)
#   REQUEUE      the command that requeues a job, without the job's number; default: scontrol requeue; empty: none
set -euo pipefail
die() { printf 'slurm.sh: %s\n' "$*" >&2; exit 2; }

tasks_of_machines() { # tasks_of_machines NUMBER: the tasks of each of the machines, one per line
    local part i found=() each=${SLURM_TASKS_PER_NODE:-}
    if [ -z "$each" ]; then # set by srun and sbatch, but not by everything that imitates them
        part=${SLURM_NTASKS_PER_NODE:-$((${SLURM_NTASKS:-$1} / $1))}
        [ $((part * $1)) = "${SLURM_NTASKS:-$((part * $1))}" ] ||
            die "SLURM_NTASKS is $SLURM_NTASKS, which is no multiple of the $1 machines: set --ntasks-per-node"
        each="$part(x$1)"
    fi
    for part in ${each//,/ }; do # 8(x2),7 -> 8 8 7
        [[ $part =~ ^([0-9]+)(\(x([0-9]+)\))?$ ]] ||
            die "SLURM_TASKS_PER_NODE is $each; it must have the form 8(x2),7"
        for ((i = 0; i < ${BASH_REMATCH[3]:-1}; i++)); do found+=("${BASH_REMATCH[1]}"); done
    done
    [ ${#found[@]} = "$1" ] || die "SLURM_TASKS_PER_NODE is $each, but there are $1 machines"
    printf '%s\n' "${found[@]}"
}

if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    # SLURM runs a copy of this file, so its own path is not in the repository.
    cd "${SLURM_SUBMIT_DIR:-.}"
    [ -f scripts/mpirun.sh ] || die "submit the job from the repository's root, not from $PWD"
    machines=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    tasks=$(tasks_of_machines "$(wc -l <<<"$machines")") || exit
    HOSTS=$(paste -d: <(echo "$machines") <(echo "$tasks") | paste -sd,)
    ranks=$(sort -u <<<"$tasks") # of each machine
    [ "$(wc -l <<<"$ranks")" = 1 ] || [ -z "${ELASTIC:-}" ] ||
        die "ELASTIC=1 needs as many tasks on each machine as on the others, not $HOSTS: set --ntasks-per-node"
elif [ -n "${DRY_RUN:-}" ]; then
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    HOSTS=${HOSTS:-node1:${RANKS:-1}}
    echo "slurm.sh: this is not a SLURM job; the command is for $HOSTS" >&2
else
    die "this is not a SLURM job; submit it with sbatch, or use scripts/mpirun.sh"
fi
export HOSTS
read -ra requeue <<<"${REQUEUE-scontrol requeue}"
# train.py's exit status after a signal, when it has saved a checkpoint
readonly saved=75
# torchrun ends with another one. Its ranks save on SIGTERM, and mpirun's on SIGUSR1.
forwarded=USR1
if [ -n "${ELASTIC:-}" ]; then forwarded=TERM; fi

signals=0
forward_signal() {
    signals=$((signals + 1))
    [ -n "${!:-}" ] || exit 143
    # Only once: a second signal would end a rank that is still saving.
    if [ "$signals" = 1 ]; then kill -"$forwarded" "$!" 2>/dev/null || true; fi
}
trap forward_signal USR1 TERM

# In the background, because bash runs a trap only after a foreground command has ended, or in `wait`. Each script
# replaces itself by the next with exec, so that the background process is mpirun itself.
case ${ELASTIC:+elastic}${1:-} in
    elastic*.sh) die "ELASTIC=1 starts train.py: pass its arguments, not a script" ;;
    elastic*)
        machines=$(tr ',' '\n' <<<"$HOSTS" | wc -l)
        export RANKS=${ranks:-${RANKS:-1}} MAX_MACHINES=$machines RUN_ID=${SLURM_JOB_ID:-dgc}
        # The job ends if this machine fails, which runs the batch script.
        export RENDEZVOUS=${RENDEZVOUS:-${HOSTS%%[:,]*}:$((20000 + ${SLURM_JOB_ID:-0} % 10000))}
        command=(srun --nodes "$machines" --ntasks "$machines" --ntasks-per-node 1 --no-kill --kill-on-bad-exit=0
            bash scripts/torchrun.sh "$@")
        if [ -n "${DRY_RUN:-}" ]; then
            echo "${command[@]}"
            exec bash scripts/torchrun.sh "$@"
        fi
        "${command[@]}" &
        ;;
    *.sh) bash "$@" & ;;
    *) bash scripts/mpirun.sh "$@" & ;;
esac
status=0
while
    seen=$signals
    wait "$!" && status=0 || status=$?
    # A signal interrupts `wait`. Its status is then not the status of the run.
    [ "$signals" != "$seen" ]
do :; done

if [ -n "${ELASTIC:-}" ] && [ "$signals" -gt 0 ] && [ "$status" != 0 ]; then status=$saved; fi
if [ "$status" = "$saved" ] && [ ${#requeue[@]} -gt 0 ]; then
    # SLURM ends this script while it requeues the job.
    trap '' USR1 TERM
    echo "slurm.sh: saved; ${requeue[*]} ${SLURM_JOB_ID:-}"
    if "${requeue[@]}" "${SLURM_JOB_ID:-}"; then exit 0; fi
    echo "slurm.sh: requeueing failed; submit the job again to resume" >&2
fi
exit "$status"
