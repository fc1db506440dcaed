# shellcheck shell=bash
# Read by the launchers: what one start of train.py needs, and how it is shown or done.
#
#   HOSTS        machines and the ranks on each, server0:8,server1:8; default: this machine
#   RANKS        ranks in all; default: as many as HOSTS has places
#   NETWORK      ethernet: TCP and nothing else; infiniband: UCX, or openib where this Open MPI has no UCX
#   INTERFACE    the interface that carries the traffic, eth1, or several, eth0,eth1; with InfiniBand it serves
#                NCCL's and Gloo's first contact, and UCX_NET_DEVICES=mlx5_0:1 chooses the adapter
#   MPI_OPTIONS  further words for mpirun or horovodrun, such as "-mca oob_tcp_if_include eth0"
#   DRY_RUN=1    prints the command and starts nothing

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$root/.venv/bin/python" ]; then PATH=$root/.venv/bin:$PATH; fi

die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 2; }

places() { # server0:8,server1:8 has 16; a machine without a number has one
    local host sum=0
    for host in ${1//,/ }; do
        case $host in
            *:*[!0-9]* | *: | :*) die "HOSTS is $1; it is written server0:8,server1:8" ;;
            *:*) sum=$((sum + 10#${host##*:})) ;;
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

says() { case " ${MPI_OPTIONS:-} " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

option() { # option PARAMETER VALUE, for mpirun, which refuses a parameter that is named twice
    says "$1" || mca+=(-mca "$1" "$2")
}

has_ucx() { # an Open MPI that does not tell is taken for a new one
    command -v ompi_info >/dev/null || return 0
    ompi_info --parsable 2>/dev/null | grep '^mca:pml:ucx:' >/dev/null
}

network() { # what NETWORK and INTERFACE mean for Open MPI (the array mca), Gloo and NCCL (the environment)
    local pml=ob1 btl=^openib
    mca=()
    case ${NETWORK:-} in
        "") if [ -n "${INTERFACE:-}" ]; then btl=tcp,self,vader; fi ;;
        ethernet)
            btl=tcp,self,vader
            export NCCL_IB_DISABLE=1
            ;;
        infiniband)
            export NCCL_IB_DISABLE=0
            if has_ucx; then
                pml=ucx
            else
                btl=openib,self,vader
                option btl_openib_allow_ib 1
            fi
            ;;
        *) die "NETWORK is $NETWORK; it must be ethernet or infiniband" ;;
    esac
    option pml "$pml"
    option btl "$btl"
    if [ -n "${INTERFACE:-}" ]; then
        case $INTERFACE in *[!A-Za-z0-9_.:,-]* | -* | ,* | *,)
            die "INTERFACE is $INTERFACE; it is the name of an interface, eth1, or several, eth0,eth1" ;;
        esac
        if says btl_tcp_if_include || says btl_tcp_if_exclude; then
            die "INTERFACE and MPI_OPTIONS both choose the interface; one of them is enough"
        fi
        # Gloo takes one only
        export NCCL_SOCKET_IFNAME=$INTERFACE HOROVOD_GLOO_IFACE=${INTERFACE%%,*}
    fi
    # Open MPI ignores both where a run both includes and excludes
    if [ "${NETWORK:-}" = infiniband ]; then
        return
    elif [ -n "${INTERFACE:-}" ]; then
        option btl_tcp_if_include "$INTERFACE"
    elif ! says btl_tcp_if_include; then
        # these have addresses that other machines take for their own
        option btl_tcp_if_exclude docker0,lo
    fi
}

known() { # whether a machine has an address, also under a name that only ssh's configuration has
    local name
    getent hosts "$1" >/dev/null && return
    name=$(ssh -G "$1" 2>/dev/null | sed -n 's/^hostname //p')
    [ -n "$name" ] && getent hosts "$name" >/dev/null
}

check_network() { # that HOSTS and INTERFACE exist, which mpirun tells in many words or not at all
    local host name here="" interfaces=${INTERFACE:-}
    [ -z "${SLURM_JOB_NODELIST:-}" ] || return 0 # SLURM knows its machines
    for host in ${HOSTS//,/ }; do
        host=${host%%:*}
        if command -v getent >/dev/null && ! known "$host"; then
            die "HOSTS names $host, which has no address here (getent hosts $host finds none)"
        fi
        case $host in localhost | "$(hostname)" | "$(hostname -s)") here=1 ;; esac
    done
    if [ -z "$here" ] || [ ! -d /sys/class/net ]; then return; fi
    for name in ${interfaces//,/ }; do
        [ -e "/sys/class/net/${name%%:*}" ] ||
            die "INTERFACE names $name, but this machine has: $(ls -m /sys/class/net)"
    done
}

start() { # becomes the command
    if [ -n "${DRY_RUN:-}" ]; then
        printf '%q ' "$@"
        echo
    else
        check_network
        command -v "$1" >/dev/null || die "there is no $1; make setup brings one"
        exec "$@"
    fi
}
