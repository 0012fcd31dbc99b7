# `make demo` trains the example agent from nothing; `make test` passes the tests. Both set up what they need first.
# `make setup-verl` makes the environment of the verl backend.

PYTHON ?= python3
VENV ?= .venv
VERL_VENV ?= .venv-verl
# Where pip looks for torch besides its usual index: an index of CPU-only builds, say.
TORCH_INDEX ?=
SEED ?= 0
DEMO ?= agl-demo

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup setup-verl gpu-check demo test real check lint format bench size clean
setup: $(READY)

$(READY): pyproject.toml constraints.txt setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH_INDEX="$(TORCH_INDEX)" sh ./setup.sh

setup-verl: $(VERL_VENV)/.ready

$(VERL_VENV)/.ready: pyproject.toml tests/real/verl/requirements.txt setup.sh setup-verl.sh
	@PYTHON="$(PYTHON)" VENV="$(VERL_VENV)" TORCH_INDEX="$(TORCH_INDEX)" sh ./setup.sh verl

demo: $(READY)
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/agl demo "$(DEMO)" --seed $(SEED) --fresh

test: $(READY)
	$(BIN)/pytest -q -m "unit or contract or integration" -rs

real: $(READY)
	$(BIN)/pytest -q -m real -rs

check: lint size test

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	@for file in benchmarks/bench_*.py; do echo "== $$file"; PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python $$file || exit 1; done

# On a machine with a GPU; `make setup-verl` comes first.
gpu-check: $(VERL_VENV)/.ready
	$(VERL_VENV)/bin/python benchmarks/gpu_check.py

size: $(READY)
	@$(BIN)/python benchmarks/size.py

clean:
	rm -rf "$(VENV)" "$(VERL_VENV)" dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
