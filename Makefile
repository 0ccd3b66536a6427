# The main commands are `make demo` and `make test`. Both set up .venv first, which is quick the second time.
# `make test-serving` creates separate environments for vLLM and LMCache in build/serving.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

BIN := .venv/bin
STAMP := .venv/.ready
PINS := requirements/pins.txt
CPP := $(sort $(wildcard cpp/*.cpp cpp/*.h cpp/*/*.cpp cpp/*/*.h))
BUILD_INPUTS := $(PINS) pyproject.toml CMakeLists.txt $(CPP)
# `make setup PYTHON=/path/to/python` chooses another Python.
PYTHON ?=
RECIPE ?= default
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: help setup demo test test-rest test-serving test-serving-smoke asan asan-smoke docs docs-serve lint format clean

help: ## show this help
	@echo "make demo    ask the default model about a long text, with the full and with a packed cache"
	@echo "make test    run up to two cases of each test, with coverage"
	@echo "make test-rest  run all other tests: more cases, whole programs, Triton's kernels"
	@echo "make test-serving  run the tests inside vLLM and LMCache, in separate environments (5 GB)"
	@echo "make test-serving-smoke  run only the tests inside LMCache (1.4 GB)"
	@echo "make asan    run the kernels' tests with AddressSanitizer and UndefinedBehaviorSanitizer (g++)"
	@echo "make asan-smoke  some cases of them, for the portable kernels only, in about 4 minutes"
	@echo "make docs    build the documentation site in build/docs/site; a broken link is an error"
	@echo "make docs-serve  show it at http://127.0.0.1:8000 while pages are edited"
	@echo "make lint    ruff, mypy, clang-format, typos, plain words"
	@echo "make format  let ruff and clang-format rewrite the code"
	@echo "make setup   build .venv with the program tersekv (the other commands do this first)"
	@echo "make clean   remove .venv and all build results"

setup: $(STAMP)

$(STAMP): $(BUILD_INPUTS)
	@python=""; \
	for candidate in "$(PYTHON)" python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	  if [ -n "$$candidate" ] && "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	    python="$$candidate"; break; \
	  fi; \
	  if [ -n "$$candidate" ] && [ "$$candidate" = "$(PYTHON)" ]; then \
	    echo "PYTHON=$(PYTHON) is not Python 3.10 or later: give another one" >&2; exit 2; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "tersekv needs Python 3.10 or later and found none: install it, or run make PYTHON=/path/to/python3" >&2; exit 2; \
	fi; \
	if ! command -v c++ g++ clang++ >/dev/null; then \
	  echo "tersekv builds a C++ extension and found no compiler: install g++ (Debian: apt-get install g++) or clang" >&2; exit 2; \
	fi; \
	if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	  echo "setup: .venv with $$("$$python" --version)"; \
	  if ! "$$python" -m venv --clear .venv; then \
	    echo "$$python cannot create a virtual environment: install venv (Debian: apt-get install python3-venv)" >&2; exit 2; \
	  fi; \
	fi
	@echo "setup: torch (1/3; the largest download)"
	@$(PIP) install "$$(grep '^torch==' $(PINS))"
	@echo "setup: the other packages (2/3)"
	@$(PIP) install -r $(PINS)
	@echo "setup: tersekv and its C++ kernels (3/3)"
	@$(BIN)/python cpp/progress.py $(BIN)/python -m pip --disable-pip-version-check install -v --no-build-isolation --no-deps -e .
	@touch $@

demo: setup ## ask the default model about a long text
	@$(BIN)/tersekv demo --recipe "$(RECIPE)"

# One thread per process: with more threads than cores, processes wait for each other most of the time. Coverage is
# measured in the fast tier alone, because Triton's interpreter takes 2.5 times as long with it.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal
test: setup ## run some cases of each test
	@$(PYTEST) --tier fast --cov=tersekv --cov-report=term:skip-covered --cov-fail-under=90

test-rest: setup ## run all other tests
	@$(PYTEST) --tier rest

# The wheel uses the build folder of setup, so that nothing is compiled again.
SERVING := build/serving
$(SERVING)/wheel/.ready: $(BUILD_INPUTS) $(shell find src -name '*.py') | $(STAMP)
	@echo "test-serving: wheel of tersekv"
	@rm -rf $(SERVING)/wheel
	@$(PIP) wheel --no-build-isolation --no-deps -w $(SERVING)/wheel .
	@touch $@

# One environment per engine. LMCache is installed without its dependencies, because they include CUDA packages that its
# serdes do not need. vLLM's vision and audio packages are built for another torch; they are removed, because text does
# not need them.
.PRECIOUS: $(SERVING)/%/.engine
$(SERVING)/%/.engine: requirements/%.txt | $(STAMP)
	@echo "test-serving: environment of $*"
	@if ! $(BIN)/python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then \
	  echo "the engines run on Python 3.11 to 3.13, and .venv has $$($(BIN)/python --version):" \
	    "run make clean, then make PYTHON=/path/to/python3.11 test-serving" >&2; exit 2; \
	fi
	@$(BIN)/python -m venv --clear $(@D)
	@torch="$$(grep '^torch==' $<)"; \
	if ! $(@D)/bin/pip -qq install "$$torch"; then \
	  echo "pip cannot install $$torch: if your package index has no CPU builds of torch," \
	    "name one that has them in PIP_EXTRA_INDEX_URL" >&2; exit 2; \
	fi
	@$(@D)/bin/pip -qq install -r $<
	@if [ $* = lmcache ]; then $(@D)/bin/pip -qq install --no-deps "$$(sed -n 's/^# without what it asks for: //p' $<)"; fi
	@$(@D)/bin/pip -qq uninstall -y torchvision torchaudio torchcodec
	@touch $@

$(SERVING)/%/.ready: $(SERVING)/%/.engine $(SERVING)/wheel/.ready
	@$(@D)/bin/pip -qq install --no-deps --force-reinstall $(SERVING)/wheel/*.whl
	@touch $@

test-serving-smoke: setup $(SERVING)/lmcache/.ready ## run the tests inside LMCache, which take seconds
	@$(SERVING)/lmcache/bin/python -m pytest tests/serving/test_lmcache.py --confcutdir=tests/serving

test-serving: test-serving-smoke $(SERVING)/vllm/.ready ## run the tests inside LMCache and vLLM
	@$(BIN)/tersekv models pull smollm2
	@$(SERVING)/vllm/bin/python -m pytest tests/serving/test_vllm_cuda.py tests/serving/test_vllm.py tests/serving/test_vllm_windows.py --confcutdir=tests/serving --durations=0

# A copy of the package with its own extension. -S keeps the editable install from being imported first. Python is not
# built with sanitizers, so their libraries are preloaded.
ASAN := build/asan
ASAN_TESTS ?= $(filter-out tests/kernels/test_ops_triton%,$(wildcard tests/kernels/test_ops_*.py)) \
  tests/kernels/test_backends.py
JOBS ?= 1
asan: setup ## run the kernels' tests with sanitizers
	@if ! command -v g++ >/dev/null; then echo "make asan needs g++ (Debian: apt-get install g++)" >&2; exit 2; fi
	@mkdir -p $(ASAN)
	@PATH="$(abspath $(BIN)):$$PATH" cmake -G Ninja -S . -B $(ASAN)/native -DPython_EXECUTABLE="$(abspath $(BIN))/python" \
	  -DCMAKE_CXX_COMPILER=g++ -DCMAKE_BUILD_TYPE=Debug -DTERSEKV_SANITIZE=ON $(ASAN_FLAGS) >$(ASAN)/cmake.log
	@PATH="$(abspath $(BIN)):$$PATH" cmake --build $(ASAN)/native --parallel $(JOBS)
	@rm -rf $(ASAN)/tersekv
	@cp -r src/tersekv $(ASAN)/
	@rm -f $(ASAN)/tersekv/kernels/cpu/_native*.so
	@cp $(ASAN)/native/_native*.so $(ASAN)/tersekv/kernels/cpu/
	@runtime=$$(ldd $(ASAN)/native/_native*.so | grep -o '/[^ ]*lib\(asan\|stdc++\)[^ ]*' | sort | tr '\n' ' '); \
	packages=$$($(BIN)/python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])'); \
	printf '%s\n' $(ASAN_TESTS) | xargs -n 3 -P $(JOBS) \
	env PYTHONPATH="$(abspath $(ASAN)):$$packages" LD_PRELOAD="$$runtime" OMP_NUM_THREADS=1 \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	$(BIN)/python -S -m pytest --capture=sys -p no:cacheprovider $(ASAN_CASES)

asan-smoke: ## run some cases of each on the portable kernels, whose code all instruction sets share
	@$(MAKE) --no-print-directory asan ASAN=build/asan-smoke ASAN_FLAGS=-DTERSEKV_PORTABLE=ON \
	  ASAN_CASES="--tier fast" ASAN_TESTS="$(filter-out %/test_backends.py,$(ASAN_TESTS))"

# An environment of its own: the site needs neither torch nor the extension.
DOCS := build/docs
$(DOCS)/.ready: requirements/docs.txt
	@echo "docs: environment"
	@$(or $(PYTHON),python3) -m venv --clear $(DOCS)/venv
	@$(DOCS)/venv/bin/pip --disable-pip-version-check -qq install -r $<
	@touch $@

docs: $(DOCS)/.ready ## build the documentation site
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/venv/bin/mkdocs build --strict
	@echo "docs: build/docs/site/index.html"

docs-serve: $(DOCS)/.ready ## show it while pages are edited
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/venv/bin/mkdocs serve --strict

lint: setup ## check style, types and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(CPP),$(BIN)/clang-format --dry-run -Werror $(CPP))
	$(BIN)/typos
	$(BIN)/python tools/words.py

format: setup ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP),$(BIN)/clang-format -i $(CPP))

clean: ## remove all build results
	rm -rf .venv build dist htmlcov .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.so' -delete
