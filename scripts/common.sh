# shellcheck shell=bash
# Functions of the launchers: they complete the settings of a run, then print or execute its command.
#
#   HOSTS        machines and the ranks on each, server0:8,server1:8; default: this machine
#   RANKS        ranks in all; default: as many as HOSTS has slots
#   NETWORK      ethernet: TCP only; infiniband: UCX, or openib if this Open MPI has no UCX
#   INTERFACE    the interface for the traffic, eth1, or several, eth0,eth1; with InfiniBand, NCCL and Gloo use
#                it to connect, and UCX_NET_DEVICES=mlx5_0:1 selects the adapter
#   MPI_OPTIONS  further options of mpirun or horovodrun, such as "-mca oob_tcp_if_include eth0"
#   DRY_RUN=1    prints the command and starts nothing

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$root/.venv/bin/python" ]; then PATH=$root/.venv/bin:$PATH; fi

die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 2; }

whole() { # whole NAME VALUE: it must be a whole number, from 1 to 999999
    case $2 in *[!0-9]* | 0* | "" | ???????*) die "$1 is $2; it must be a whole number, at least 1 and at most 999999" ;; esac
}

count_slots() { # server0:8,server1:8 has 16 slots; a machine without a number has one
    local host entry='[^:, ]+(:0*[1-9][0-9]{0,5})?' sum=0
    [[ $1 =~ ^$entry(,$entry)*$ ]] || die "HOSTS is $1; it must have the form server0:8,server1:8"
    for host in ${1//,/ }; do
        case $host in
            *:*) sum=$((sum + 10#${host##*:})) ;;
            *) sum=$((sum + 1)) ;;
        esac
    done
    echo "$sum"
}

complete_settings() { # sets RANKS and HOSTS, and variables that a single machine needs
    local found cores
    [ "$#" -gt 0 ] || die "no arguments for train.py; begin with --configs configs/cifar/resnet20.py"
    whole RANKS "${RANKS:-1}"
    if [ -n "${HOSTS:-}" ]; then
        found=$(count_slots "$HOSTS") || exit
        RANKS=${RANKS:-$found}
        [ "$RANKS" -le "$found" ] || die "HOSTS has $found slots, but RANKS is $RANKS"
    else
        [ -n "${RANKS:-}" ] || die "set the number of ranks: RANKS=8, or HOSTS=server0:8,server1:8"
        HOSTS=localhost:$RANKS
        cores=$(nproc)
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > RANKS ? cores / RANKS : 1))}
    fi
    if [ "$(id -u)" = 0 ]; then # as in a container
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
}

has_option() { case " ${MPI_OPTIONS:-} " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

option() { # option PARAMETER VALUE: adds it unless MPI_OPTIONS sets it; mpirun refuses a parameter given twice
    has_option "$1" || mca+=(-mca "$1" "$2")
}

has_ucx() { # without ompi_info, UCX is assumed
    command -v ompi_info >/dev/null || return 0
    ompi_info --parsable 2>/dev/null | grep '^mca:pml:ucx:' >/dev/null
}

network() { # applies NETWORK and INTERFACE to Open MPI (the array mca), Gloo and NCCL (the environment)
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
            die "INTERFACE is $INTERFACE; it must be the name of an interface, eth1, or several, eth0,eth1" ;;
        esac
        if has_option btl_tcp_if_include || has_option btl_tcp_if_exclude; then
            die "INTERFACE and MPI_OPTIONS both set the interface; remove one of them"
        fi
        # Gloo supports only one interface
        export NCCL_SOCKET_IFNAME=$INTERFACE HOROVOD_GLOO_IFACE=${INTERFACE%%,*}
    fi
    # Open MPI ignores both lists if both are set
    if [ "${NETWORK:-}" = infiniband ]; then
        return
    elif [ -n "${INTERFACE:-}" ]; then
        option btl_tcp_if_include "$INTERFACE"
    elif ! has_option btl_tcp_if_include; then
        # other machines have interfaces with the same addresses
        option btl_tcp_if_exclude docker0,lo
    fi
}

has_address() { # whether a machine has an address, also by a name of ssh's configuration
    local name
    getent hosts "$1" >/dev/null && return
    name=$(ssh -G "$1" 2>/dev/null | sed -n 's/^hostname //p')
    [ -n "$name" ] && getent hosts "$name" >/dev/null
}

check_network() { # checks that HOSTS and INTERFACE exist; mpirun's own messages are unclear
    local host name here="" interfaces=${INTERFACE:-}
    [ -z "${SLURM_JOB_NODELIST:-}" ] || return 0 # SLURM assigns the machines
    for host in ${HOSTS//,/ }; do
        host=${host%%:*}
        if command -v getent >/dev/null && ! has_address "$host"; then
            die "HOSTS has $host, but this name has no address here (getent hosts $host finds none)"
        fi
        case $host in localhost | "$(hostname)" | "$(hostname -s)") here=1 ;; esac
    done
    if [ -z "$here" ] || [ ! -d /sys/class/net ]; then return; fi
    for name in ${interfaces//,/ }; do
        [ -e "/sys/class/net/${name%%:*}" ] ||
            die "there is no interface $name (INTERFACE); this machine has: $(ls -m /sys/class/net)"
    done
}

start() { # replaces this process by the command, or prints it
    if [ -n "${DRY_RUN:-}" ]; then
        printf '%q ' "$@"
        echo
    else
        check_network
        command -v "$1" >/dev/null || die "$1 not found; make setup installs it"
        exec "$@"
    fi
}
