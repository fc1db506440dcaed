#!/usr/bin/env bash
# Trains under horovodrun:
#
#   RANKS=8 scripts/horovodrun.sh --configs configs/cifar/resnet20.py configs/dgc/wm5.py
#   HOSTS=server0:4,server1:4 scripts/horovodrun.sh --configs configs/cifar/resnet20.py configs/dgc/wm5.py
#
# HOSTS, RANKS, INTERFACE, MPI_OPTIONS and DRY_RUN are described in scripts/common.sh. NETWORK reaches NCCL only:
# horovodrun gives MPI options of its own, and they mean TCP.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
settle "$@"
network

options=(-np "$RANKS" -H "$HOSTS")
if [ -n "${INTERFACE:-}" ]; then
    options+=(--network-interfaces "$INTERFACE")
    unset NCCL_SOCKET_IFNAME HOROVOD_GLOO_IFACE # it sets both
fi
if [ -n "${MPI_OPTIONS:-}" ]; then options+=("--mpi-args=$MPI_OPTIONS"); fi
start horovodrun "${options[@]}" python "$root/train.py" "$@"
