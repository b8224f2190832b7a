# `make help` lists the targets. PYTHON makes the environment; PY is the interpreter that everything else runs with:
# name one on the command line (make test PY=python3) to use it as it is, and no environment is made.
PYTHON ?= python3
VENV ?= .venv
PY ?= $(VENV)/bin/python
STAMP := $(VENV)/.flash_kda_installed
PINS := $(VENV)/constraints.txt

ifeq ($(origin PY),command line)
READY :=
FLASH_KDA := flash-kda
else
READY := $(STAMP)
FLASH_KDA := $(VENV)/bin/flash-kda
endif

# Tests of one file stay in one process: some share what they compile or interpret.
WORKERS := -n auto --maxprocesses 8 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-gpu sanitize bench-gpu bench-cpu

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(READY)  ## make .venv with the package and its tools, once

# A python3 whose torch sees a GPU lends that torch to the environment (through a .pth file where python3 lives in an
# environment of its own); otherwise the pinned torch is installed. Triton is added where torch brings none.
$(STAMP): pyproject.toml constraints.txt
	@echo "venv: making $(VENV)"
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	    $(PYTHON) -m venv --system-site-packages $(VENV) && \
	    grep -v -e '^torch==' -e '^triton==' constraints.txt > $(PINS) && \
	    { $(VENV)/bin/python -c 'import torch' 2>/dev/null || \
	      $(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
	      > "$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_of_python3.pth"; }; \
	else \
	    $(PYTHON) -m venv $(VENV) && grep -v '^triton==' constraints.txt > $(PINS) && \
	    $(VENV)/bin/python -m pip install --quiet -c $(PINS) torch; \
	fi
	@$(VENV)/bin/python -m pip install --quiet -c $(PINS) -e '.[dev]'
	@$(VENV)/bin/python -c 'import triton' 2>/dev/null || { grep '^triton==' constraints.txt >> $(PINS); \
	    $(VENV)/bin/python -m pip install --quiet -c $(PINS) -e '.[triton]'; }
	@touch $@

demo: $(READY)  ## run the demonstration: trains a small model, checks it against the reference, writes a report
	$(FLASH_KDA) demo

test: $(READY)  ## check style and types, then run every test; those that need a GPU show as skipped without one
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest $(WORKERS)

# Most of their time goes into compiling, so several processes share the GPU.
test-gpu: $(READY)  ## run the tests that need a GPU, and only these
	$(PY) -m pytest -m "gpu and not alone" -n 8
	$(PY) -m pytest -m "gpu and alone"

sanitize: $(READY)  ## run every configuration under compute-sanitizer, memcheck and racecheck, on a GPU
	$(PY) tests/sanitize.py

bench-gpu: $(READY)  ## measure speed and accuracy on a GPU, beside the peers that are installed
	$(FLASH_KDA) bench prefill --gates strong --gates slow --gates softplus
	$(FLASH_KDA) bench decode
	$(FLASH_KDA) bench train --gates strong --gates slow --gates softplus --no-recompute
	$(FLASH_KDA) bench scale
	$(FLASH_KDA) accuracy
	$(FLASH_KDA) accuracy --dtype float32

bench-cpu: $(READY)  ## time the CPU backend beside the plain torch versions of fla-core
	$(PY) -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("fla") and u.find_spec("einops")))' || \
	    $(PY) -m pip install --quiet --no-deps -c constraints.txt fla-core einops
	$(PY) benchmarks/cpu.py
