#!/usr/bin/env bash
# Make .venv with the `minisgl` command, all extras and what the tests need.
#
# Takes the CPU build of torch on a machine without an NVIDIA GPU. Does nothing when run again and
# neither pyproject.toml, the constraints nor this script has changed.
#   PYTHON=...          the Python to use (default: the first one that is new enough)
#   PIP_FIND_LINKS=...  folders with wheels, as pip reads it; looked at first for torch
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD

say() { printf 'setup: %s\n' "$*" >&2; }

new_enough() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

choose_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    say "no usable Python found (tried: ${PYTHON:-python3 and python3.11 to python3.14})."
    say "MiniSGLang needs Python 3.11 or later with its venv module. On Debian or Ubuntu:"
    say "    apt-get install python3 python3-venv"
    say "or name one: make setup PYTHON=/path/to/python3.11"
    return 1
}

has_nvidia_gpu() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

python=$(choose_python)
if has_nvidia_gpu; then
    constraints=constraints/cuda.txt extras=dev,cuda
else
    constraints=constraints/cpu.txt extras=dev
fi

stamp=.venv/.minisgl-setup
key=$({ echo "$root $extras"; "$python" -V; cat pyproject.toml "$constraints" scripts/setup.sh; } \
    | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && [ -x .venv/bin/minisgl ]; then
    exit 0
fi

say "making .venv with $("$python" -V) for a machine $([ "$extras" = dev ] && echo without || echo with) an NVIDIA GPU"
rm -f "$stamp"
# Scripts in a virtual environment hold its path: one that came from elsewhere is made anew, as is
# one of another Python or one whose making broke off.
if ! [ -x .venv/bin/pip ] || [ "$(.venv/bin/python -c 'import sys; print(sys.prefix)' 2>/dev/null)" != "$root/.venv" ] \
    || ! head -1 .venv/bin/pip | grep -qF "$root/.venv/" \
    || [ "$(.venv/bin/python -V 2>&1)" != "$("$python" -V 2>&1)" ]; then
    rm -rf .venv
    "$python" -m venv .venv
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
pip install --quiet --upgrade 'pip>=25'

if [ "$extras" = dev ] && ! .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' 2>/dev/null; then
    torch=$(grep '^torch==' "$constraints")
    if pip install --quiet --no-index --no-deps "$torch+cpu" 2>/dev/null; then
        say "took $torch+cpu from PIP_FIND_LINKS"
    elif pip install --quiet --no-deps --timeout 15 --retries 1 \
        --index-url https://download.pytorch.org/whl/cpu "$torch+cpu" 2>/dev/null; then
        say "took $torch+cpu from PyTorch's index of CPU builds"
    else
        say "PyTorch's index of CPU builds cannot be reached: taking $torch from PyPI instead."
        say "It works as well, but on Linux it brings the CUDA libraries: about 3 GB to download."
    fi
fi
pip install --quiet --constraint "$constraints" --editable ".[$extras]"
echo "$key" >"$stamp"
say "done: .venv/bin/minisgl"
