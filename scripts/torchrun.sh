#!/usr/bin/env bash
# Trains under torchrun, and goes on after a rank or a machine is lost. Start the same command on every machine:
#
#   HOSTS=server0:8,server1:8 scripts/torchrun.sh --configs configs/imagenet/resnet50.py configs/dgc/wm0.py
#   RANKS=4 scripts/torchrun.sh --configs configs/digits/cnn.py          # this machine alone
#   ELASTIC=1 sbatch --no-kill --nodes 4 --ntasks-per-node 8 scripts/slurm.sh --configs ...   # every machine of a job
#
# If a rank is killed or ends with an error, torchrun starts all ranks again, unless the error is one of settings or
# files (status 2). If a machine is lost, the others go on without it. A machine that is started later joins. The
# ranks resume from the last checkpoint, which all machines must see at the same place. See docs/elastic.md.
#
#   HOSTS         machines and the ranks on each; the same text on every machine. Default: this machine
#   RANKS         ranks on this machine. Default: its number in HOSTS
#   MIN_MACHINES  the run waits while there are fewer machines; default: 1
#   MAX_MACHINES  more machines do not join; default: as many as HOSTS has
#   RENDEZVOUS    machine:port of the store through which the machines find each other. Default: the first machine of
#                 HOSTS, port 29400. The run ends if this machine is lost. A store that outlives it, on a machine
#                 that does not train: python -m scripts.rendezvous 29400
#   RUN_ID        name of the run at the store. A store that serves several runs needs a new one for each, also after
#                 a run has ended. Default: dgc
#   RESTARTS      failures of this machine's ranks until it gives up; default: 10
#   LAST_CALL     seconds that a start waits for more machines than MIN_MACHINES; default: 30
#   RDZV_CONF     further settings of the rendezvous, such as keep_alive_interval=2,keep_alive_max_attempt=5: a
#                 machine that is silent for 2 x 5 seconds is lost. Default of torchrun: 5 x 3 seconds
#   INTERFACE     the interface for the traffic, for Gloo and NCCL: eth1
#   DRY_RUN=1     prints the command and starts nothing
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 0
fi
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ "$#" -gt 0 ] || die "no arguments for train.py; begin with --configs configs/cifar/resnet20.py, or --help"

is_here() { # whether a name is a name of this machine
    local short
    short=$(hostname -s 2>/dev/null || hostname)
    case $1 in localhost | 127.0.0.1 | "$(hostname)" | "$short" | "$short".*) return 0 ;; *) return 1 ;; esac
}

machines=1
first=localhost
if [ -n "${HOSTS:-}" ]; then
    count_slots "$HOSTS" >/dev/null || exit
    IFS=, read -ra entries <<<"$HOSTS"
    machines=${#entries[@]}
    first=${entries[0]%%:*}
    for entry in "${entries[@]}"; do
        if [ -z "${RANKS:-}" ] && is_here "${entry%%:*}"; then
            case $entry in *:*) RANKS=${entry##*:} ;; *) RANKS=1 ;; esac
        fi
    done
    [ -n "${RANKS:-}" ] || die "HOSTS is $HOSTS, and this machine is $(hostname); set RANKS, its number of ranks"
fi
[ -n "${RANKS:-}" ] || die "set the number of ranks: RANKS=8, or HOSTS=server0:8,server1:8"
MAX_MACHINES=${MAX_MACHINES:-$machines}
MIN_MACHINES=${MIN_MACHINES:-1}
RESTARTS=${RESTARTS:-10}
LAST_CALL=${LAST_CALL:-30}
for name in RANKS MIN_MACHINES MAX_MACHINES RESTARTS LAST_CALL; do whole "$name" "${!name}"; done
[ "$MIN_MACHINES" -le "$MAX_MACHINES" ] || die "MIN_MACHINES is $MIN_MACHINES, more than MAX_MACHINES, $MAX_MACHINES"
alone=
if [ -z "${HOSTS:-}${RENDEZVOUS:-}" ]; then alone=1; fi
RENDEZVOUS=${RENDEZVOUS:-$first:29400}
[[ $RENDEZVOUS =~ ^[^:]+:([1-9][0-9]{0,4})$ && ${BASH_REMATCH[1]} -lt 65536 ]] ||
    die "RENDEZVOUS is $RENDEZVOUS; it must have the form server0:29400, with a port from 1 to 65535"

# torchrun would otherwise keep one store for all attempts, in which restarted ranks find the addresses of dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc)
    export OMP_NUM_THREADS=$((cores > RANKS ? cores / RANKS : 1))
fi
if [ -n "${INTERFACE:-}" ]; then export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=${INTERFACE%%,*}; fi

# scripts/agent.py is torchrun, except that machines may be lost while ranks are being started, and that ranks whose
# settings are wrong are not started again.
command=(python "$root/scripts/agent.py" --nproc-per-node "$RANKS" --max-restarts "$RESTARTS")
if [ -n "$alone" ]; then
    command+=(--standalone) # on a free port
else
    command+=(--nnodes "$MIN_MACHINES:$MAX_MACHINES"
        --rdzv-backend persistent --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${RUN_ID:-dgc}"
        --rdzv-conf "last_call_timeout=$LAST_CALL,read_timeout=30${RDZV_CONF:+,$RDZV_CONF}")
fi
command+=(--no-python python "$root/train.py" "$@")
if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
command -v torchrun >/dev/null || die "torchrun not found; make setup installs it"
exec "${command[@]}"
