#!/bin/sh
# Makes the virtual environment $VENV for development and the demo, or with the argument `verl` one for that backend.
# Says first what will be downloaded.
set -eu

say() { printf '%s\n' "$*" >&2; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    say "agl needs Python 3.11 or newer, and '$PYTHON' is not that."
    say "Name another one: make setup PYTHON=python3.12"
    exit 3
}
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || {
    say "'$PYTHON' cannot make virtual environments."
    say "Install its venv module (on Debian and Ubuntu: apt install python3-venv)."
    exit 3
}

[ "${1:-}" != verl ] || exec sh ./setup-verl.sh

# A torch of the same Python that is there already is used as it is: in a virtual environment that is active, of the Python
# behind it, because that is what a new one inherits from.
behind=$("$PYTHON" -c 'import sys; print(sys._base_executable)')
site=""
torch="torch: about 200 MB as a CPU build; on Linux x86-64 the default is a CUDA build of about 3 GB.
  For the small one: make setup TORCH_INDEX=<the CPU index that PyTorch's install page names>"
if version=$("$behind" -c 'import torch; print(torch.__version__)' 2>/dev/null); then
    site="--system-site-packages"
    torch="torch: nothing, $version is there already"
fi
say "Setting up $VENV. Downloads from your package index, unless cached:"
say "  agl's dependencies, transformers, openai, test and lint tools: about 120 MB"
say "  $torch"

"$PYTHON" -m venv $site "$VENV"
pip="$VENV/bin/python -m pip --disable-pip-version-check"
$pip install --quiet --upgrade "pip>=25.1"
if [ -z "$site" ]; then
    if [ -n "$TORCH_INDEX" ]; then
        $pip install --constraint constraints.txt --index-url "$TORCH_INDEX" torch
    else
        $pip install --constraint constraints.txt torch
    fi
    $pip install --quiet --constraint constraints.txt --editable ".[demo]" --group test --group lint --group build
else
    # The torch that is there decides its own version.
    grep -v '^torch==' constraints.txt > "$VENV/constraints.txt"
    $pip install --quiet --constraint "$VENV/constraints.txt" --editable ".[demo]" --group test --group lint --group build
fi
touch "$VENV/.ready"
say "Ready: $VENV/bin/agl"
