# make demo      train on real data with two processes, from nothing
# make demo-elastic  the same while three processes are killed, one after the other, and come back; draws the loss
# make test      the Python tests that need PyTorch and NumPy only, but the slow ones (8 minutes, installation included)
# make ci        what every change must pass, on a clone of HEAD in a clean environment; half an hour
# make flaky     the quick tests, the C++ tests and the sanitizers' 20 times on a busy machine: lists what fails by chance (a night); FLAKY_ARGS="--runs 3"
# make test-all  these, the C++ tests, those of TensorFlow, Keras, JAX, MPI and MXNet, and the slow ones (45 minutes)
# make thorough  all slow tests, and what takes longer still: more schedules, more frameworks (two hours)
# make scenarios Horovod's elastic jobs by horovodrun: every scenario with NumPy, PyTorch, TensorFlow and Keras, SCENARIO_RUNS=1 times (15 minutes each)
# make soak      elastic jobs on hosts that are namespaces, under 2,500 faults drawn at random (as root; up to two hours); SOAK_ARGS="--faults 100 --seed 1"
# make soak-short random operations for five minutes, verified, and what memory they take; SOAK_ARGS="--seconds 60 --np 4"
# make lint      style, types, warnings of C++ as errors; which lock guards what, if there is a Clang
# make sanitize  the C++ tests under ThreadSanitizer and AddressSanitizer + UBSan
# make fuzz      every decoder with libFuzzer (needs Clang 15) and atheris, FUZZ_SECONDS=20 each; prints coverage
# make matrix    the tests of each front end with old and new versions, over one wheel (8 GB, an hour)
# make clients   train by Lightning, DeepSpeed, RETURNN and others over one wheel, compared with gloo (45 GB, an hour)
# make c10d      PyTorch's own tests of torch.distributed over gloo and Kolovod, into bench/results/c10d.md (20 minutes)
# make launchers start the example by Slurm, Open MPI, MPICH and torchrun, into bench/results/launchers.md (as root)
# make docs      the documentation as a site, into build/site; a broken link is an error (make docs-links asks other servers, too)
# make wheels    the wheels and the source distribution of a release, each one tried, into dist/ (20 minutes); WHEELS_ARGS="--arch x86_64"
# make bench     measure against Gloo, Open MPI, MPICH and DDP (about 15 minutes, on a quiet machine)
#
# Needs Python 3.10+, a C++20 compiler and make; everything else goes into .venv in this folder.
# Each step that installs leaves a stamp and runs again only when what it depends on has changed.

PYTHON ?= python3
# One version, because the tests compare results bit by bit with PyTorch's own. On Linux x86-64 the
# default package index may serve this with CUDA, gigabytes that nothing here uses: to save them point
# pip at PyTorch's CPU index first (PIP_INDEX_URL or PIP_EXTRA_INDEX_URL; pip then prefers +cpu).
TORCH ?= torch==2.13.0
TEST_ARGS ?=
MATRIX_ARGS ?=
CLIENTS_ARGS ?=
C10D_ARGS ?=
BENCH_ARGS ?=
LAUNCHERS_ARGS ?=
SOAK_ARGS ?=
FLAKY_ARGS ?=
FUZZ_SECONDS ?= 20
SCENARIO_RUNS ?= 1
WHEELS_ARGS ?=
FUZZ_ARGS ?=
CLANG ?= clang++

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
BUILD_TOOLS := 'scikit-build-core>=0.11' 'nanobind>=2.4' 'cmake>=3.22' ninja
NATIVE := CMakeLists.txt pyproject.toml $(shell find csrc -type f \( -name '*.cc' -o -name '*.h' -o -name '*.c' -o -name CMakeLists.txt \))
# All files of it: templates, styles and scripts of reports are in the wheel, too.
PACKAGE := $(NATIVE) README.md LICENSE $(shell find src -type f -not -path '*/__pycache__/*')
CXX_FILES := $(shell find csrc bench scripts -name '*.cc' -o -name '*.h' -o -name '*.c')

USERS_PATH := $(PATH)
export PATH := $(CURDIR)/$(BIN):$(PATH)
# A shell that sits in another virtual environment must not leak into this one.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH
# Nothing here is a make below this one, and ninja does not find the job server that it is told of.
unexport MAKEFLAGS MFLAGS

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-elastic test test-all test-ci test-environments test-frameworks test-slow test-mxnet thorough ci flaky install-ci scenarios native-tests test-native test-slow-native soak soak-short lint lint-locks lint-style lint-types lint-types-of-tools lint-layers sanitized-thread sanitized-address sanitize sanitize-thread sanitize-address fuzz matrix clients c10d launchers docs docs-links wheels bench clean

help:
	@sed -n 's/^# make/make/p' Makefile

# --- installing ---------------------------------------------------------------------------------------

# What is never imported need not be compiled to bytecode: a third of the time that the frameworks take to install.
export PIP_NO_COMPILE := 1

$(STAMPS)/venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/tools: $(STAMPS)/venv pyproject.toml
	$(PIP) install --quiet $(BUILD_TOOLS)
	touch $@

# After the package, so that no two of pip's runs meet when make runs several things at a time.
$(STAMPS)/torch: $(STAMPS)/venv | $(STAMPS)/package
	$(PIP) install --quiet '$(TORCH)'
	touch $@

# The package is compiled once, here: every environment installs this wheel. Without build isolation the build folder is
# used again: after a change only that is compiled. CI takes the compiler's warnings for errors, with its own compiler.
$(STAMPS)/wheel: $(STAMPS)/tools $(PACKAGE)
	rm -rf build/wheel
	$(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel \
	    $(if $(CI),--config-settings=cmake.define.KOLOVOD_WERROR=ON) .
	touch $@

# Twice: what it depends on, if that is missing; then the package itself, which has the version that is installed.
$(STAMPS)/package: $(STAMPS)/wheel
	$(PIP) install --quiet build/wheel/kolovod-*.whl
	$(PIP) install --quiet --force-reinstall --no-deps build/wheel/kolovod-*.whl
	touch $@

# $(call extras,NAMES): what extras bring. The package itself is brought up to date by the stamp above.
extras = $(PIP) install --quiet "$$(echo build/wheel/kolovod-*.whl)[$(1)]"
FRAMEWORKS := test-frameworks,test-browser,mpi,integrations,tensorflow,keras,jax,ray,spark
ALL_EXTRAS := examples,test,$(FRAMEWORKS),lint,docs

$(STAMPS)/examples: pyproject.toml $(STAMPS)/torch | $(STAMPS)/package
	$(call extras,examples)
	touch $@

$(STAMPS)/test: pyproject.toml $(STAMPS)/examples
	$(call extras,test)
	touch $@

$(STAMPS)/frameworks: pyproject.toml $(STAMPS)/test
	$(call extras,$(FRAMEWORKS))
	touch $@

$(STAMPS)/lint: pyproject.toml $(STAMPS)/examples
	$(call extras,lint)
	touch $@

# All that CI needs, at once: pip decides about everything a single time.
install-ci: $(STAMPS)/package $(STAMPS)/torch
	$(call extras,$(ALL_EXTRAS))
	for stamp in examples test frameworks lint docs; do touch $(STAMPS)/$$stamp; done

# The header of the C++ tests: the system's, or else Debian's package, unpacked here because that needs no root. Without
# either CMake says what to install.
$(STAMPS)/doctest: $(STAMPS)/venv
	@if echo '#include <doctest/doctest.h>' | $(CXX) -x c++ -fsyntax-only - 2>/dev/null; then touch $@; \
	elif command -v apt-get >/dev/null; then \
	    (cd $(VENV) && apt-get -q download doctest-dev && dpkg-deb -x doctest-dev_*.deb .) && touch $@ || true; fi

# --- running ------------------------------------------------------------------------------------------

demo: $(STAMPS)/package $(STAMPS)/examples
	$(BIN)/kolovod run -np 2 -- $(BIN)/python examples/torch_digits.py --compare

demo-elastic: $(STAMPS)/package $(STAMPS)/examples
	$(BIN)/kolovod run --elastic -np 3 -- $(BIN)/python examples/elastic_torch.py --kills 3 --compare

test-all: test test-native test-frameworks test-slow test-mxnet

# Two files of tests at a time: their ranks wait for each other half the time. TEST_ARGS="-n 0 --pdb" takes one.
pytest = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=25 --durations-min=1 -m '$(1)' $(TEST_ARGS)

test: $(STAMPS)/package $(STAMPS)/test
	$(call pytest,not slow and not frameworks)

test-frameworks: $(STAMPS)/package $(STAMPS)/frameworks
	$(call pytest,frameworks and not slow)

test-slow: test-slow-native $(STAMPS)/package $(STAMPS)/frameworks
	$(call pytest,slow and not thorough)

# What CI runs, in one go: all that is not slow, and of what is an eighth in turn (tests/support/rotation.py).
SLOW_PARTS ?= 8
test-ci: $(STAMPS)/package $(STAMPS)/frameworks
	$(call pytest,not thorough) --slow-parts $(SLOW_PARTS)

# Tests of commands once more, with what machines may set, or lack: `.ci/run` clears all that otherwise. In one process:
# pytest-xdist's workers would have a standard input of their own.
UNUSUAL := PATH="$$PATH" PYTHONUNBUFFERED=1 LANG=C LC_ALL=C TERM=xterm-256color
test-environments: $(STAMPS)/package $(STAMPS)/test
	trap '' PIPE; exec env -i $(UNUSUAL) $(BIN)/python -m pytest -n 0 -m 'environments and not slow' <&-

thorough: test-slow-native $(STAMPS)/package $(STAMPS)/frameworks
	$(call pytest,slow or thorough)

# What every change must pass, run on HEAD in a clone of its own; the commit that passed is in build/ci-passed.
ci:
	rm -rf build/ci
	git clone --quiet . build/ci
	cd build/ci && env -i HOME="$$HOME" PATH="$(USERS_PATH)" bash .ci/run
	git -C build/ci rev-parse HEAD >build/ci-passed

# The tests that a change meets, 20 times on a busy machine: what fails in any run is a race. Hours; FLAKY_ARGS="--runs 3".
flaky: $(STAMPS)/package $(STAMPS)/test native-tests sanitized-address sanitized-thread
	$(BIN)/python scripts/flaky.py $(FLAKY_ARGS)

scenarios: $(STAMPS)/package $(STAMPS)/frameworks
	for run in $$(seq $(SCENARIO_RUNS)); do \
	    $(BIN)/python -m pytest tests/horovod/test_horovod_elastic_jobs.py $(TEST_ARGS) || exit 1; done

# MXNet needs an old NumPy, and so an environment of its own; it is not run where Python is too new for that.
test-mxnet: $(STAMPS)/wheel
	$(BIN)/python scripts/matrix.py build/wheel/kolovod-*.whl --only mxnet-1.9.1 --no-table -- $(TEST_ARGS)

soak: $(STAMPS)/package $(STAMPS)/test
	$(BIN)/python bench/chaos.py $(SOAK_ARGS)

soak-short: $(STAMPS)/package $(STAMPS)/frameworks
	$(BIN)/python scripts/soak.py $(SOAK_ARGS)

# $(call native,FOLDER,OPTIONS): configure and build the core and its C++ tests.
comma := ,
native = @mkdir -p build; \
	$(BIN)/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_PREFIX_PATH=$(CURDIR)/$(VENV)/usr \
	-DKOLOVOD_TESTS=ON -DKOLOVOD_PYTHON=OFF $(2) >build/$(1).log || { cat build/$(1).log; exit 1; }; \
	$(BIN)/cmake --build build/$(1) -- --quiet
# Three at a time: most wait for threads and clocks.
ctest = $(BIN)/ctest --test-dir build/$(1) -j 3 --output-on-failure --no-tests=error --timeout 300

native-tests: $(STAMPS)/tools $(STAMPS)/doctest
	$(call native,native-tests,-DKOLOVOD_WERROR=ON)

test-native: native-tests
	$(call ctest,native-tests) -LE slow

test-slow-native: native-tests
	$(call ctest,native-tests) -L slow

# The newest Clang that is here; without one the locks are not checked.
CLANG_FOUND := $(firstword $(foreach name,$(CLANG) $(addprefix clang++-,22 21 20 19 18 17 16 15),$(shell command -v $(name))))
LOCKED_FILES := $(shell find csrc -name '*.cc' -not -name '*_test.cc' -not -path 'csrc/fuzz/*' -not -path 'csrc/testing/*' -not -name module.cc)
LOCK_OPTIONS := -std=c++20 -Icsrc -DKOLOVOD_RELEASE='""' -Wthread-safety -Werror

# Which lock guards what (csrc/base/thread_annotations.h).
lint-locks:
ifeq ($(CLANG_FOUND),)
	@echo "no clang++ is here (CLANG=...): that locks are held where they must be is not checked"
else
	@mkdir -p build
	@$(CLANG_FOUND) $(LOCK_OPTIONS) -x c++-header csrc/base/standard_headers.h -o build/standard_headers.pch
	@printf '%s\n' $(LOCKED_FILES) | xargs -P $$(nproc) -n 8 $(CLANG_FOUND) $(LOCK_OPTIONS) -fsyntax-only -include-pch build/standard_headers.pch
endif

lint-style: $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

lint-types: $(STAMPS)/lint
	$(BIN)/mypy

# With a cache of its own, so that both can run at a time.
lint-types-of-tools: $(STAMPS)/lint
	$(BIN)/mypy --cache-dir .mypy_cache/tools bench scripts

lint-layers: $(STAMPS)/lint
	PYTHONPATH=src $(BIN)/lint-imports --no-cache

lint: lint-locks lint-style lint-types lint-types-of-tools lint-layers native-tests

sanitize: sanitize-thread sanitize-address

# Without the longest ones, of which the same code has shorter ones; test-slow runs all of them as they are.
SANITIZED := -E '^engine_(names_test|(names|hosts)_test_shuffled_.*)$$'

sanitized-thread: $(STAMPS)/tools $(STAMPS)/doctest
	$(call native,tsan,-DKOLOVOD_SANITIZE=thread)

sanitize-thread: sanitized-thread
	TSAN_OPTIONS=halt_on_error=1 $(call ctest,tsan) $(SANITIZED)

# With warnings as errors: CI builds these tests in no other way.
sanitized-address: $(STAMPS)/tools $(STAMPS)/doctest
	$(call native,asan,-DKOLOVOD_WERROR=ON -DKOLOVOD_SANITIZE=address$(comma)undefined)

sanitize-address: sanitized-address
	ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 $(call ctest,asan) $(SANITIZED)

$(STAMPS)/fuzz: pyproject.toml $(STAMPS)/test
	$(call extras,fuzz)
	touch $@

# With optimization, since a fuzzer is as good as it is fast.
fuzz: $(STAMPS)/package $(STAMPS)/fuzz
	@mkdir -p build
	@$(BIN)/cmake -S . -B build/fuzz -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DCMAKE_CXX_COMPILER=$(CLANG) -DKOLOVOD_FUZZ=ON -DKOLOVOD_PYTHON=OFF >build/fuzz.log || { cat build/fuzz.log; exit 1; }
	$(BIN)/cmake --build build/fuzz -- --quiet
	$(BIN)/python scripts/fuzz.py build/fuzz --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)

# Each row of scripts/matrix.py has an environment of its own; --only NAME in MATRIX_ARGS.
matrix: $(STAMPS)/wheel
	$(BIN)/python scripts/matrix.py build/wheel/kolovod-*.whl $(MATRIX_ARGS)

# Each row of scripts/client_rows.py trains by a client that nobody here wrote; --only NAME in CLIENTS_ARGS.
clients: $(STAMPS)/wheel $(STAMPS)/package
	$(BIN)/python scripts/clients.py build/wheel/kolovod-*.whl $(CLIENTS_ARGS)

$(STAMPS)/c10d: pyproject.toml $(STAMPS)/examples
	$(call extras,c10d)
	touch $@

# --only PATTERN, --sizes 2,3 and --backends kolovod in C10D_ARGS.
c10d: $(STAMPS)/package $(STAMPS)/c10d
	$(BIN)/python scripts/c10d.py $(C10D_ARGS)

# Needs Debian's slurm-wlm, munge, openmpi-bin and mpich; --only NAMES in LAUNCHERS_ARGS. Ten minutes.
launchers: $(STAMPS)/package $(STAMPS)/frameworks
	$(BIN)/python scripts/launchers_check.py $(LAUNCHERS_ARGS)

$(STAMPS)/docs: pyproject.toml $(STAMPS)/venv | $(STAMPS)/package
	$(call extras,docs)
	touch $@

# The package, for the commands' help; everything else is read from the sources. --quiet would not count warnings.
docs: $(STAMPS)/package $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python scripts/docs_links.py build/site

docs-links: docs
	$(BIN)/python scripts/docs_links.py build/site --external

$(STAMPS)/release: pyproject.toml $(STAMPS)/venv | $(STAMPS)/package
	$(call extras,release)
	touch $@

wheels: $(STAMPS)/release $(STAMPS)/doctest
	$(BIN)/python scripts/wheels.py $(WHEELS_ARGS)

# --quick in BENCH_ARGS: three minutes, into files of their own; docs/benchmarks.md and the chart stay as they are.
bench: $(STAMPS)/package $(STAMPS)/examples
	$(BIN)/python bench/collectives.py $(BENCH_ARGS)
	$(BIN)/python bench/training.py $(BENCH_ARGS)
	$(BIN)/python bench/overhead.py $(if $(findstring --quick,$(BENCH_ARGS)),--rounds 1 --steps 10 --output build/bench)
ifeq ($(findstring --quick,$(BENCH_ARGS)),)
	$(BIN)/python bench/report.py
	$(BIN)/python bench/chart.py
endif

clean:
	rm -rf build $(VENV)
