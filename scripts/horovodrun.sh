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
if [ -n "${MPI_OPTIONS:-}" ]; then options+=("--mpi-args=$MPI_OPTIONS"); fi
start horovodrun "${options[@]}" python "$root/train.py" "$@"
