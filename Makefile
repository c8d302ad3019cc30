# Two commands matter: `make train` (a first run, on any machine) and `make test`.
# The first of either makes .venv; constraints.txt keeps the CPU commands on a small build of torch.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Test processes at a time, each with a pool of its own; a file's tests stay together.
PROCESSES ?= 2
PYTEST := $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: train test test-all check clean

train: $(READY)
	$(BIN)/longspan train examples/quickstart.yaml --overwrite

test: $(READY)
	$(PYTEST)

test-all: $(READY)
	$(PYTEST) --all-cells

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(PYTEST) -m "not slow and not dist and not gpu and not multi_gpu"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "longspan needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv out build dist *.egg-info src/*.egg-info .pytest_cache .ruff_cache .hypothesis
