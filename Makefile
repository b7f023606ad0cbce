# The only entry points of the project; .ci/run calls `make ci`.
# Needs python3 (with venv and headers), g++ and make. Everything else comes from PyPI.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := $(abspath .venv)
PY := $(VENV)/bin/python
# cmake and ninja of the environment go before those of the machine.
export PATH := $(VENV)/bin:$(PATH)
# nproc heeds OMP_NUM_THREADS, which is about threads of a rank.
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# One compiler for all builds, or pip's would take another name of it and share nothing in ccache.
export CC CXX
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Folders are listed too: their time changes when a file is removed.
SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc python -not -name '*.pyc' -not -name __pycache__)
CPP_FILES = $(shell find csrc tests/cpp tests/fuzz -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

ARGS ?=
# Runs alone: a thousand members need all cores.
TEST_OF_THE_WHOLE_MACHINE = tests/deep/test_thousand_members.py
# Files of tests at a time, 0: one after the other. Some wait for time to pass, so more than cores.
TEST_JOBS ?= $(shell echo $$(( $(JOBS) < 8 ? $(JOBS) + 2 : 8 )))
# Python keeps compiled test modules, or each worker and rank would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv build horovod integrations mailbox engines demo test test-deep lint format cuda-check wheel docs sanitize fuzz soak soak-mailbox soak-schedules bench curves clean ci

help: ## Say what there is (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  make test ARGS='tests/single -k layers' hands ARGS to pytest; demo and bench take ARGS too."

venv: $(VENV)/.requirements ## Make .venv: torch and the tools, at the versions of requirements-dev.txt

$(VENV)/.requirements: requirements-dev.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --progress-bar off --quiet -r requirements-dev.txt
	touch $@

build: $(VENV)/.installed ## Build and install the package into .venv (what changed only; ccache is used if there)

# Without isolation and dependencies, or pip would fetch another torch to build against.
$(VENV)/.installed: $(VENV)/.requirements $(SOURCES)
	$(PY) -m pip install -v --no-build-isolation --no-deps .
	touch $@

horovod: $(VENV)/.horovod ## Build Horovod from PyPI into .venv, for its tests (3 minutes, once; the wheel is kept)

$(VENV)/.horovod: $(VENV)/.requirements tools/build_horovod tools/horovod-requirements.txt
	tools/build_horovod $(PY)
	touch $@

integrations: $(VENV)/.integrations ## Install Lightning, Accelerate, transformers and others into .venv, for their tests

# Both files at once, or pip might replace torch.
$(VENV)/.integrations: $(VENV)/.requirements requirements-integrations.txt
	$(PY) -m pip install --progress-bar off --quiet -r requirements-dev.txt -r requirements-integrations.txt
	touch $@

mailbox: $(VENV)/.mailbox ## Install an S3 server and the clients of S3 and SFTP into .venv, for their tests

$(VENV)/.mailbox: $(VENV)/.requirements requirements-mailbox.txt
	$(PY) -m pip install --progress-bar off --quiet -r requirements-dev.txt -r requirements-mailbox.txt
	touch $@

ENGINES := $(abspath build)/engines

engines: $(ENGINES)/.installed ## Install Ray, Spark, fastai, ultralytics into build/engines, beside .venv, for their tests (1 GB; Spark needs Java)

# The second environment has the packages of .venv, torch and bagua among them, by a .pth file.
$(ENGINES)/.installed: $(VENV)/.integrations requirements-engines.txt requirements-trainers.txt
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(ENGINES)/lib/python3*/site-packages)/venv.pth
	$(ENGINES)/bin/python -m pip install --progress-bar off --quiet -r requirements-engines.txt && \
	  $(ENGINES)/bin/python -m pip install --progress-bar off --quiet --no-deps -r requirements-trainers.txt && touch $@ || \
	  echo "PyPI lacks a package of requirements-engines.txt for this Python: tests of those that are missing are skipped."

demo: build ## Train on handwritten digits with 2 ranks; print the table, write demo.png
	OMP_NUM_THREADS=1 $(PY) docs/examples/digits_table.py $(ARGS)

test: build ## Run the tests that every change must pass
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-deep: build horovod integrations mailbox engines ## Run the long tests: launchers, other packages, faults, CUDA code on a CPU, fuzzing, the model
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder \
	  -o cache_dir=build/deep_cache --cache-clear tests/deep tests/integrations --ignore $(TEST_OF_THE_WHOLE_MACHINE) $(ARGS) || \
	  OMP_NUM_THREADS=1 $(PY) tools/again_alone tests/deep tests/integrations
	$(if $(ARGS),,OMP_NUM_THREADS=1 $(PY) -m pytest -p no:xdist $(TEST_OF_THE_WHOLE_MACHINE))

lint: venv ## Check layout, style and types
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CPP_FILES)
	mypy

format: venv ## Lay out all files as lint wants them
	ruff check --fix .
	ruff format .
	clang-format -i $(CPP_FILES)

# ThreadSanitizer of g++ 12 cannot start where address randomisation is too strong; switch it off if allowed.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)

THREAD_SANITIZER = OMP_NUM_THREADS=1 \
  TSAN_OPTIONS="suppressions=$(CURDIR)/tests/cpp/tsan.supp halt_on_error=1 second_deadlock_stack=1" \
  $(FIXED_ADDRESSES)

sanitize: venv ## Run the C++ programs of the tests under ThreadSanitizer, then under Address- and UBSanitizer
	cmake -S . -B build/tsan -G Ninja -DBAGUA_SANITIZE=thread -DPython_EXECUTABLE=$(PY)
	cmake --build build/tsan --target schedules stress_nccl
	$(THREAD_SANITIZER) bash -c 'build/tsan/stress_nccl && build/tsan/schedules --count 700'
	cmake -S . -B build/asan -G Ninja -DBAGUA_SANITIZE=address,undefined -DPython_EXECUTABLE=$(PY)
	cmake --build build/asan --target schedules stress_nccl
	OMP_NUM_THREADS=1 UBSAN_OPTIONS=print_stacktrace=1 build/asan/schedules --count 700
	UBSAN_OPTIONS=print_stacktrace=1 build/asan/stress_nccl
	$(MAKE) fuzz ARGS="--seconds 1"

# Inputs for each target; --seconds S instead; --target NAME.
FUZZ_ARGS = $(if $(ARGS),$(ARGS),--inputs 1050000)

fuzz: venv ## Give every decoder random and changed valid bytes, 10 million in all, under sanitizers (15 minutes)
	cmake -S . -B build/asan -G Ninja -DBAGUA_SANITIZE=address,undefined -DPython_EXECUTABLE=$(PY)
	cmake --build build/asan --target fuzz
	for program in build/asan/fuzz_codec build/asan/fuzz_messages build/asan/fuzz_nccl; do \
	  test ! -x $$program || OMP_NUM_THREADS=1 UBSAN_OPTIONS=print_stacktrace=1 $$program $(FUZZ_ARGS); \
	done

NVCC ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)

cuda-check: venv ## Compile and link all CUDA code without a GPU (TORCH=2.15.0: with that torch, 5 GB of it)
ifneq ($(TORCH),)
	CUDACXX=$(NVCC) tools/check_torch $(TORCH)
else ifeq ($(NVCC),)
	@echo "There is no nvcc on this machine: the CUDA code was not compiled. Install the CUDA toolkit (12 or 13)."
else
	CUDACXX=$(NVCC) cmake -S . -B build/cuda -G Ninja -DBAGUA_CUDA=ON -DBAGUA_NCCL=ON -DBAGUA_STRICT=ON -DPython_EXECUTABLE=$(PY) \
	  -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/build/cuda/python/bagua
	cmake --build build/cuda
	tools/cuda_report $$(find build/cuda -name '*.cu.o')
	$(PY) tools/cuda_import_check build/cuda/python/bagua
	$(PY) tools/gpu_hour --dry-run --build build/cuda --out build/gpu/dry-run
	rm -rf build/old_cuda
	NVCC=$(NVCC) CUDACXX=$(CURDIR)/tools/old_nvcc cmake -S . -B build/old_cuda -G Ninja -DBAGUA_CUDA=ON -DPython_EXECUTABLE=$(PY)
endif

wheel: venv ## Build wheel and source distribution into dist/, install the wheel in a new environment, train
	tools/check_wheel $(PY)

DOCS := $(abspath build)/docs

docs: $(DOCS)/.requirements ## Build the documentation site, build/site/index.html; dead links and misspellings are errors
	$(DOCS)/bin/codespell README.md CONTRIBUTING.md CHANGELOG.md docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

$(DOCS)/.requirements: requirements-docs.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --progress-bar off --quiet -r requirements-docs.txt
	touch $@

soak: build horovod ## What counts on luck or time: 2300 faults, 100,000 steps, 50 ends and slow starts, 20 restarts, 2000 killed writers
	OMP_NUM_THREADS=1 $(PY) benchmarks/soak.py
	OMP_NUM_THREADS=1 $(PY) benchmarks/soak_weeks.py
	$(MAKE) soak-mailbox ARGS=
	BAGUA_TEST_EXITS=50 BAGUA_TEST_STARTS=50 OMP_NUM_THREADS=1 \
	  $(PY) -m pytest tests/ranks/test_exit.py tests/deep/test_horovod_launchers.py \
	  tests/deep/test_compressed_starts.py -k every $(ARGS)
	BAGUA_TEST_RESTARTS=20 BAGUA_TEST_KILLED_WRITERS=2000 OMP_NUM_THREADS=1 \
	  $(PY) -m pytest tests/deep/test_restarts.py tests/deep/test_killed_writers.py -k moment $(ARGS)
	BAGUA_TEST_DOUBLE_KILLS=50 OMP_NUM_THREADS=1 $(PY) -m pytest tests/deep/test_elastic_jobs.py $(ARGS)
	$(MAKE) soak-schedules ARGS=

soak-mailbox: build mailbox ## 1,000 kills and 200 notices of islands in a folder, then 500 faults in an S3 server (ARGS="--seed S")
	OMP_NUM_THREADS=1 $(PY) tests/faults/mailbox_job.py --kills 1000 --notices 200 $(ARGS)
	OMP_NUM_THREADS=1 $(PY) tests/faults/mailbox_job.py --faults 500 --s3 $(ARGS)

soak-schedules: venv ## 10 000 random schedules under ThreadSanitizer (ARGS="--seed S")
	cmake -S . -B build/tsan -G Ninja -DBAGUA_SANITIZE=thread -DPython_EXECUTABLE=$(PY)
	cmake --build build/tsan --target schedules
	$(THREAD_SANITIZER) build/tsan/schedules --count 10000 $(ARGS)

bench: build ## Run all benchmarks (ARGS=--quick: a first impression); results go to build/benchmarks
	for program in benchmarks/bench_*.py; do echo "== $$program"; $(PY) $$program $(ARGS); done

curves: build ## Train every algorithm on three tasks of real data (6 hours, goes on where it was ended); build/benchmarks/curves.md
	OMP_NUM_THREADS=1 $(PY) benchmarks/curves.py $(ARGS)

clean: ## Remove what was built; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache demo.png demo.json $(VENV)/.installed
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# Joined by +: at the same time, since each of them leaves a core idle for a while.
CI_STAGES := venv build lint+docs cuda-check test horovod integrations mailbox engines test-deep sanitize demo

ci: ## All of it, as the continuous integration does: install, lint, docs, CUDA, Horovod, tests, sanitize, demo
	@begin=$$SECONDS; \
	for stage in $(CI_STAGES); do \
	  echo; echo "==== $$stage ===="; start=$$SECONDS; \
	  case $$stage in *+*) jobs="-j3 --output-sync=target" ;; *) jobs= ;; esac; \
	  $(MAKE) $$jobs $${stage//+/ } || { echo "==== $$stage: failed after $$((SECONDS - start)) s ===="; exit 1; }; \
	  echo "==== $$stage: $$((SECONDS - start)) s ===="; \
	done; \
	echo; echo "==== ci: all passed in $$((SECONDS - begin)) s ===="
