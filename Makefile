# make demo: train a real model in a few minutes.  make test: the whole test suite.  Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

demo: $(VENV)/.ready
	$(BIN)/dapo train recipes/guess_five.yaml run.name=guess_five-$(shell date +%Y%m%d-%H%M%S) $(ARGS)

test: $(VENV)/.ready
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks.cpu $(ARGS)
	$(BIN)/python -m benchmarks.rewards

# torch goes first and alone: its exact version names the CPU build where the index has one.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("dapo needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV): torch and the other packages, one to three minutes, this once ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[gym]' \
		|| echo "reasoning-gym was not installed (it needs a C compiler): gym tasks and their tests are left out"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
