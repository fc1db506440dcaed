#!/usr/bin/env bash
# Trains under horovodrun:
#
#   RANKS=8 scripts/horovodrun.sh --configs configs/cifar/resnet20.py configs/dgc/wm5.py
#   HOSTS=server0:4,server1:4 scripts/horovodrun.sh --configs configs/cifar/resnet20.py configs/dgc/wm5.py
#
# HOSTS, RANKS, INTERFACE, MPI_OPTIONS and DRY_RUN are described in scripts/common.sh. NETWORK affects only NCCL:
# horovodrun passes MPI options that select TCP.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
complete_settings "$@"
network

options=(-np "$RANKS" -H "$HOSTS")
if [ -n "${INTERFACE:-}" ]; then
    options+=(--network-interfaces "$INTERFACE")
    unset NCCL_SOCKET_IFNAME HOROVOD_GLOO_IFACE # horovodrun sets both
fi
# without this parameter, horovodrun makes mpirun begin each line with the rank: [1,0]<stdout>:
has_option orte_tag_output || MPI_OPTIONS="-mca orte_tag_output 0${MPI_OPTIONS:+ $MPI_OPTIONS}"
options+=("--mpi-args=$MPI_OPTIONS")
start horovodrun "${options[@]}" python "$root/train.py" "$@"
