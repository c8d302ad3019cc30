# Two commands matter: `make train` (a first run, on any machine) and `make test`.
# The first of either makes .venv; constraints.txt keeps the CPU commands on a small build of torch.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Tests that need one process run in so many at a time, a file's together. Those on several processes have the machine to
# themselves: two pools on two cores wait for each other's ranks more than they gain.
PROCESSES ?= 2
PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := -n $(PROCESSES) --dist loadfile

.PHONY: train test test-all check clean

train: $(READY)
	$(BIN)/longspan train examples/quickstart.yaml --overwrite

test: $(READY)
	$(PYTEST) $(SIDE_BY_SIDE) $(CELLS) -m "not dist"
	$(PYTEST) $(CELLS) -m dist

test-all: CELLS := --all-cells
test-all: test

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not dist and not gpu and not multi_gpu"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "longspan needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv out build dist *.egg-info src/*.egg-info .pytest_cache .ruff_cache .hypothesis
