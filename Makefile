# make serve   install, fetch the default model, and serve it    (make serve ARGS="server.port=8001 scheduler=static")
# make test    install, lint, type-check and run the tests       (make test ARGS="tests/engine -k preempt" WORKERS=1)

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed

.PHONY: serve test lint types setup clean

serve: setup
	$(BIN)/python -m core.models smollm2_135m
	$(BIN)/python -m core.serve recipe=premium_chat $(ARGS)

test: lint types
	$(BIN)/python -m core.models smollm2_135m
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Partwise needs Python 3.11 or newer; name one with make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
