#!/usr/bin/env bash
# Starts one group of ranks, a torchrun job of its own, which meets other groups in outer steps:
#
#   python -m dgc.groups serve --state groups/decisions.json                     # once, on any machine
#   COORDINATOR=10.0.0.1:29444 GROUP=1 RANKS=2 scripts/groups.sh --configs configs/digits/cnn.py \
#       configs/local/diloco.py configs/local/machines.py configs/local/groups.py
#
# Start the same command with another GROUP on every other machine, at any time. A group with several ranks needs
# configs/local/machines.py before configs/local/groups.py. See docs/groups.md.
#
#   COORDINATOR  host:port of the coordinator; all groups reach it, and each other
#   GROUP        number of this group, from 1: it is the seed of its data, and its name
#   RANKS        ranks on this machine; default: 1
#   FOLDER       keeps the last committed state; default: groups/GROUP
#   DRY_RUN=1    prints the command and starts nothing; all other variables are as in scripts/torchrun.sh
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 0
fi
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ "$#" -gt 0 ] || die "no arguments for train.py; begin with --configs configs/digits/cnn.py, or --help"
[[ ${COORDINATOR:-} =~ ^[^:]+:([1-9][0-9]{0,4})$ && ${BASH_REMATCH[1]} -lt 65536 ]] ||
    die "COORDINATOR is ${COORDINATOR:-not set}; it must have the form 10.0.0.1:29444, with a port from 1 to 65535"
[ -n "${GROUP:-}" ] || die "GROUP is not set: give each group a number of its own, from 1"
whole GROUP "$GROUP"
[ -z "${HOSTS:-}${RENDEZVOUS:-}" ] || die "a group is on one machine: leave out HOSTS and RENDEZVOUS, and set RANKS"
folder=$(realpath -m "${FOLDER:-groups/$GROUP}")
export RANKS=${RANKS:-1}
# groups of one machine must not write into one run directory
case " $* " in
    *" --suffix "* | *" --suffix="* | *" --run-dir "* | *" --run-dir="*) ;;
    *) set -- "$@" --suffix ".group$GROUP" ;;
esac
exec "$root/scripts/torchrun.sh" "$@" "--configs.train.groups.address=$COORDINATOR" \
    "--configs.train.groups.folder=$folder" "--configs.train.groups.name=group$GROUP" "--configs.seed=$GROUP"
