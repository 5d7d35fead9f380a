# `make demo` and `make test` each make their own environment in .venv first.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= auto

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch numpy
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/.installed  ## train a small Llama on two ranks, then check parity
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m autoshard.tools.demo

test: .venv/.installed  ## run the whole test suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: .venv/.installed  ## ruff, mypy --strict, codespell; that docs/features.md and CHANGELOG.md are true
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python -m autoshard.tools.features --check
	$(BIN)/python -m autoshard.tools.changelog --check

site: .venv/.installed  ## build the documentation into .site; a warning is an error
	PATH="$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

docs: site  ## that, and run all code in it
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/docs

features: .venv/.installed  ## write docs/features.md anew from the tests, and CHANGELOG.md from changelog.d
	$(BIN)/python -m autoshard.tools.features
	$(BIN)/python -m autoshard.tools.changelog

goldens: .venv/.installed  ## write the golden files anew; read the diff
	EXPECTTEST_ACCEPT=1 $(BIN)/python -m pytest tests/golden

# A CUDA build of torch, in an environment of its own, with a device that does nothing in front.
NULL := $(CURDIR)/.null-cuda
NULL_TORCH ?= 2.14.1

$(NULL)/.installed: pyproject.toml
	$(PYTHON) -m venv $(NULL)
	$(NULL)/bin/pip install -q torch==$(NULL_TORCH) numpy
	$(NULL)/bin/pip install -q -e '.[test]'
	touch $@

null-cuda:  ## run tests/device on a CUDA device that does nothing but count
	@$(MAKE) --no-print-directory $(NULL)/.installed || \
		{ echo "skipped: no CUDA build of torch $(NULL_TORCH) is to be had"; exit 0; }; \
	library=$$($(NULL)/bin/python tests/support/null_cuda/build.py $(NULL)/device) && \
	LD_LIBRARY_PATH=$(NULL)/device LD_PRELOAD=$$library OMP_NUM_THREADS=1 \
		$(NULL)/bin/python -m pytest -rs tests/device

# The libraries that train, in an environment of their own.
HOSTS := $(CURDIR)/.hosts

$(HOSTS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(HOSTS)
	$(HOSTS)/bin/pip install -q -c constraints.txt torch numpy
	$(HOSTS)/bin/pip install -q -c constraints.txt -e '.[test,hosts,torchtitan]'
	touch $@

hosts: $(HOSTS)/.installed  ## run tests/integrations with the real Accelerate, TRL, PEFT, Lightning, torchtitan
	OMP_NUM_THREADS=1 $(HOSTS)/bin/python -m pytest -rs -n $(WORKERS) tests/integrations

.PHONY: help demo test lint site docs features goldens null-cuda hosts
