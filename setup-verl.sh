#!/bin/sh
# What setup.sh goes on with for the verl backend: an environment of its own, since verl wants an older transformers.
# The versions are those of pyproject.toml's extra `verl`; without a GPU, all are those that the tests run with.
set -eu

say() { printf '%s\n' "$*" >&2; }

say "Setting up $VENV. Downloads from your package index, unless cached:"
"$PYTHON" -m venv "$VENV"
pip="$VENV/bin/python -m pip --disable-pip-version-check"
$pip install --quiet --upgrade "pip>=25.1"
if nvidia-smi -L > /dev/null 2>&1; then
    say "  agl's dependencies, verl, Ray, vLLM and a CUDA build of torch: several GB"
    $pip install --quiet --editable ".[verl,vllm]"
else
    say "  agl's dependencies, verl, Ray, openai: about 400 MB. There is no NVIDIA GPU here, so no vLLM."
    say "  torch: about 200 MB as a CPU build; on Linux x86-64 the default is a CUDA build of about 3 GB."
    say "    For the small one: make setup-verl TORCH_INDEX=<the CPU index that PyTorch's install page names>"
    lock=tests/real/verl/requirements.txt
    grep -v '^torch==' "$lock" > "$VENV/constraints.txt" # any build of it will do
    torch=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' "$lock")
    $pip install --quiet --constraint "$VENV/constraints.txt" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
    $pip install --quiet --constraint "$VENV/constraints.txt" --editable ".[verl,demo]"
fi
touch "$VENV/.ready"
say "Ready: $VENV/bin/agl"
