# shellcheck shell=bash
# Read by the launchers: what one start of train.py needs, and how it is shown or done.
#
#   HOSTS        machines and the ranks on each, server0:8,server1:8; default: this machine
#   RANKS        ranks in all; default: as many as HOSTS has places
#   MPI_OPTIONS  further words for mpirun or horovodrun, such as "-mca btl_tcp_if_include eth1"
#   DRY_RUN=1    prints the command and starts nothing

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$root/.venv/bin/python" ]; then PATH=$root/.venv/bin:$PATH; fi

die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 2; }

places() { # server0:8,server1:8 has 16; a machine without a number has one
    local host sum=0
    for host in ${1//,/ }; do
        case $host in
            *:*[!0-9]* | *: | :*) die "HOSTS is $1; it is written server0:8,server1:8" ;;
            *:*) sum=$((sum + ${host##*:})) ;;
            *) sum=$((sum + 1)) ;;
        esac
    done
    echo "$sum"
}

settle() { # makes RANKS and HOSTS complete, and what one machine needs
    local found cores
    [ "$#" -gt 0 ] || die "no words for train.py; begin with --configs configs/cifar/resnet20.py"
    case ${RANKS:-1} in *[!0-9]* | 0*) die "RANKS is ${RANKS:-}; it must be a whole number, at least 1" ;; esac
    if [ -n "${HOSTS:-}" ]; then
        found=$(places "$HOSTS") || exit
        RANKS=${RANKS:-$found}
        [ "$RANKS" -le "$found" ] || die "HOSTS has $found places, but $RANKS ranks are to start"
    else
        [ -n "${RANKS:-}" ] || die "how many ranks? RANKS=8, or HOSTS=server0:8,server1:8"
        HOSTS=localhost:$RANKS
        cores=$(nproc)
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > RANKS ? cores / RANKS : 1))}
        if [ "$RANKS" -gt "$cores" ]; then export OMPI_MCA_mpi_yield_when_idle=1; fi
    fi
    if [ "$(id -u)" = 0 ]; then # as in a container
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
}

start() { # becomes the command
    if [ -n "${DRY_RUN:-}" ]; then
        printf '%q ' "$@"
        echo
    else
        command -v "$1" >/dev/null || die "there is no $1; make setup brings one"
        exec "$@"
    fi
}
