#!/usr/bin/env bash
# Trains on several machines, or on this one, under Open MPI:
#
#   HOSTS=server0:8,server1:8 scripts/mpirun.sh --configs configs/imagenet/resnet50.py configs/dgc/wm0.py
#   RANKS=4 scripts/mpirun.sh --configs configs/digits/cnn.py
#
# The repository and its environment must have the same path on every machine, and ssh must work without a
# password. HOSTS, RANKS, NETWORK, INTERFACE, MPI_OPTIONS and DRY_RUN are described in scripts/common.sh.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
complete_settings "$@"
network

exported=()
for name in PATH LD_LIBRARY_PATH OMP_NUM_THREADS NCCL_DEBUG; do
    if [ -n "${!name:-}" ]; then exported+=(-x "$name"); fi
done
for name in NCCL_IB_DISABLE NCCL_SOCKET_IFNAME HOROVOD_GLOO_IFACE UCX_NET_DEVICES; do
    if [ -n "${!name:-}" ]; then exported+=(-x "$name=${!name}"); fi
done
read -ra more <<<"${MPI_OPTIONS:-}"
# With its full path, mpirun looks for its own files at the same path on the other machines.
start "$(command -v mpirun || echo mpirun)" -np "$RANKS" -H "$HOSTS" -bind-to none -map-by slot \
    "${exported[@]}" ${mca[@]+"${mca[@]}"} ${more[@]+"${more[@]}"} python "$root/train.py" "$@"
