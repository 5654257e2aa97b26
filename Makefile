# `make help` lists the targets. PYTHON=python3.12 chooses another Python than python3.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# What is installed where PyTorch is missing; any PyTorch from 2.6 on that is already there is used instead.
TORCH := torch==2.13.0
HAS_TORCH := import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6))

NATIVE_SOURCES := $(shell find coarse -name '*.cpp' -o -name '*.hpp' -o -name '*.inc' -o -name '*.cuh')
FORMATTED_SOURCES = $(shell find coarse tests benchmarks -name '*.cpp' -o -name '*.hpp' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cc')

# Where it is set, each process would compile all of PyTorch again (10 s for each import, not 3).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train train-tf experiments benchmarks gpu cuda docs model wheels wheels-all quick test test-all lint python-test native-test native-test-asan native-test-tsan clean

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

train: $(INSTALLED)  ## Train the digits with COARSE and with torch DDP, and compare them in a table.
	$(BIN)/python benchmarks/train_digits.py

train-tf: $(INSTALLED)  ## Train the digits with Keras, on workers of COARSE and in one process, and compare them in a table.
	$(BIN)/python benchmarks/train_tf_digits.py

experiments: $(INSTALLED)  ## Run the paper's experiments and rewrite their tables of results (minutes).
	$(BIN)/python -m experiments

gpu: $(INSTALLED)  ## Run what only a GPU decides: tests and benchmarks, in a table beside their aims (ten minutes).
	$(BIN)/python benchmarks/gpu_report.py

# Newer compilers than those of the environment; no wheel of CUDA 12 has nvcc, so put one on PATH for that.
CUDA_12 := nvidia-cuda-nvrtc-cu12
CUDA_13 := nvidia-cuda-nvrtc nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime
cuda: $(INSTALLED)  ## Compile the kernels by the newest NVRTC of CUDA 12 and 13, and nvcc, which are downloaded (600 MB).
	$(BIN)/python -m pip install -q --upgrade --no-deps --target build/cuda-12 $(CUDA_12)
	$(BIN)/python -m pip install -q --upgrade --no-deps --target build/cuda-13 $(CUDA_13)
	PYTHONPATH=build/cuda-12:build/cuda-13 $(BIN)/python -m pytest -q tests/unit/test_cuda_sources.py

docs: $(INSTALLED)  ## Build the documentation as a site in build/site; broken links are errors.
	$(BIN)/python -m sphinx -W --keep-going -q -c docs/site . build/site -d build/site-doctrees

model:  ## Check the model of membership changes by Spin (minutes; skipped where Spin is missing).
	@$(PYTHON) tests/models/membership_model.py

wheels: $(INSTALLED)  ## Build a wheel for this Python into dist/, for C libraries from glibc 2.28 on (minutes).
	$(BIN)/python packaging/wheels.py

wheels-all: $(INSTALLED)  ## Build wheels for CPython 3.10 to 3.14 into dist/ (ten minutes).
	$(BIN)/python packaging/wheels.py --python all

quick: $(INSTALLED)  ## Run ruff, the unit tests and the core of the multi-process tests: the loop while you work.
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q $(IN_PARALLEL) tests/unit tests/multiproc/test_sync.py

benchmarks: $(INSTALLED)  ## Run the benchmarks and rewrite the tables of docs/benchmarks.md (an hour, on a quiet machine).
	$(BIN)/python benchmarks/tables.py

test:  ## Run all linters and tests but the slow ones, the native ones under sanitizers.
	@$(MAKE) --jobs=2 lint native-test-sanitized  # native tests build while Python's packages are installed
	@$(MAKE) python-test

test-all:  ## The same with the slow tests, and more examples of what must hold for any (an hour).
	@$(MAKE) --jobs=2 lint native-test-sanitized
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest $(IN_PARALLEL)

# Two files of tests at a time: most of them wait for processes that start. In the order of folders, which ends with
# the short tests, so that both end together.
IN_PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder
python-test: $(INSTALLED)  ## Run the Python tests that are not slow.
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not slow"

lint: $(INSTALLED)  ## Run ruff, codespell, mypy, the stub test and clang-format; changes nothing.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $$(git ls-files)
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest coarse.kernels._native --allowlist tests/native_stub_allowlist.txt
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED_SOURCES)

native-test: build/native.tests  ## Run the native tests (skipped where cmake or GoogleTest is missing).
native-test-asan: build/native-asan.tests  ## The native tests under the address and undefined behaviour sanitizers.
native-test-tsan: build/native-tsan.tests  ## The native tests under the thread sanitizer.
.PHONY: native-test-sanitized
native-test-sanitized:  # one after the other, so that what else is to be done has a core
	@$(MAKE) --jobs=1 native-test-asan native-test-tsan

build/native.tests: SANITIZE :=
build/native-asan.tests: SANITIZE := address,undefined
build/native-tsan.tests: SANITIZE := thread
# What one thread does alone has no races; of the shapes of clusters those with the most threads of each kind are enough.
build/native-tsan.tests: LEAVE_OUT := *oneThread*:All/Exchanges*/3clients*:All/Jobs*/1clients*:All/Jobs*/3clients*:Shapes/Optimizers*/2clients*

# Half of them in a process each: most wait for threads.
.PHONY: build/native.tests build/native-asan.tests build/native-tsan.tests
build/native.tests build/native-asan.tests build/native-tsan.tests: build/%.tests:
	@if ! command -v cmake >/dev/null; then echo "native tests SKIPPED: install cmake to run them"; \
	elif ! echo '#include <gtest/gtest.h>' | $(CXX) -E -x c++ - >/dev/null 2>&1; then \
	  echo "native tests SKIPPED: install libgtest-dev (GoogleTest) to run them"; \
	else \
	  cmake -S tests/native -B build/$* -DCMAKE_CXX_COMPILER=$(CXX) -DCOARSE_SANITIZE=$(SANITIZE) && \
	  cmake --build build/$* --parallel $$(nproc) && export GTEST_TOTAL_SHARDS=2 GTEST_FILTER='*-$(LEAVE_OUT)' && \
	  { GTEST_SHARD_INDEX=0 timeout 900 build/$*/coarse_native_tests --gtest_brief=1 & half=$$!; \
	    GTEST_SHARD_INDEX=1 timeout 900 build/$*/coarse_native_tests --gtest_brief=1; other=$$?; \
	    wait $$half && exit $$other; }; \
	fi

clean:  ## Remove the environment, builds and caches; results in runs/ stay.
	rm -rf $(VENV) build dist *.egg-info coarse/kernels/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --no-compile: what is imported is compiled then; all of PyTorch, TensorFlow and Ray takes longer than installing them.
$(INSTALLED): pyproject.toml setup.py $(NATIVE_SOURCES) | $(BIN)/python
	@$(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null || { echo "installing $(TORCH)"; $(BIN)/python -m pip install --no-compile $(TORCH); }
	$(BIN)/python -m pip install --no-compile -e '.[torch,examples,trainers,checkpoint,dashboard,plot,dev]'
	@touch $@

# A new environment sees the packages of $(PYTHON) only where PyTorch is one of them, for it is large. Where $(PYTHON)
# belongs to an environment itself, that takes a path file: --system-site-packages means those of the system's Python.
SITE_PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed, $(PYTHON) is not; try make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make environments; install its venv package (apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo "Python.h is missing; install Python's headers (apt install python3-dev)" >&2; exit 1; }
	@command -v $(firstword $(CXX)) >/dev/null || { echo "$(CXX) is missing (apt install g++)" >&2; exit 1; }
	@if $(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null; then share=--system-site-packages; fi; \
	  $(PYTHON) -m venv $$share $(VENV) && \
	  if [ -n "$$share" ] && ! $(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null; then \
	    $(PYTHON) -c '$(SITE_PACKAGES)' > "$$($(BIN)/python -c '$(SITE_PACKAGES)')/outer.pth"; \
	  fi
