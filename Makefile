# make           this list
# make test      everything that needs no GPU: lint, format, types, unit and golden tests
# make test-slow the tests that `make test` leaves out: they repeat on more ranks, or compiled, what others test
# make demo      set up, then plan two profiler traces by simulation
# make test-ray  the tests that need Ray, which is installed for them alone: it is 70 MB
# make images    draw the README's pictures anew
# make test-gpu  the tests that need GPUs; with a single one, two ranks share it and tests of times are skipped
# make bench     the benchmarks that need no GPU
# make docs      the documentation site in build/site; every link in it is checked (`make test` builds it, too)
# make wheel     in dist: a wheel with the launch filter compiled for x86-64 and AArch64 (by Zig), and a source archive
#
# The first call sets up .venv with the versions in constraints.txt. PYTHON=python3.12 picks another interpreter. The tests also
# install torch (constraints-torch.txt): a build for CPUs is enough.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-input
CHECKED := $(wildcard src tests benchmarks examples website)

.PHONY: help test test-slow test-ray demo docs images test-gpu bench wheel setup torch compiler clean

# the comment at the top of this file
help:
	@sed -n -e '/^#/!q' -e 's/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

test: torch compiler docs
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy --strict src
	$(BIN)/pytest -n 2 --dist loadgroup tests/unit tests/golden

test-slow: torch compiler
	$(BIN)/pytest -n 2 --dist loadgroup -m slow tests/unit tests/golden

demo: $(VENV)/installed-plain
	$(BIN)/counterpoint tune examples/traces/starved.rank0.json.gz
	$(BIN)/counterpoint demo

# the pictures of the README
images: $(VENV)/installed-plain
	$(BIN)/counterpoint tune examples/traces/starved.rank0.json.gz --timeline docs/images/timeline.svg
	$(BIN)/counterpoint tune examples/traces/starved.rank0.json.gz --timeline docs/images/timeline.dark.svg

# the theme's makers warn of a next major version of MkDocs, which the constraints keep out
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-ray: setup
	$(PIP_INSTALL) --constraint constraints.txt "ray>=2.40,<3"
	$(BIN)/pytest -rs tests/unit/test_cluster_ray.py

test-gpu: torch
	@ls -d tests/gpu tests/multigpu >/dev/null 2>&1 || { echo "There are no GPU tests in this checkout; make test runs the others." >&2; exit 2; }
	$(BIN)/pytest -rs $(wildcard tests/gpu tests/multigpu)

bench: setup
	@test -d benchmarks || { echo "There are no benchmarks in this checkout." >&2; exit 2; }
	$(BIN)/python -m benchmarks

# Zig compiles on any Linux; it is installed for this target alone, since it is 100 MB
wheel: setup
	$(PIP_INSTALL) --constraint constraints.txt "ziglang>=0.14,<1" "hatchling>=1.25,<2"
	rm -rf build/filter
	$(BIN)/python -m counterpoint.launch_filter.prebuilt build/filter
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/hatchling build --target sdist --directory dist
	rm -rf build/filter

setup: $(VENV)/installed

# what planning needs, and nothing for tests
$(VENV)/installed-plain: constraints.txt pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) --constraint constraints.txt hatchling editables
	$(PIP_INSTALL) --constraint constraints.txt --no-build-isolation --editable .
	@touch $@

$(VENV)/installed: $(VENV)/installed-plain
	$(PIP_INSTALL) --requirement constraints.txt
	@touch $@

torch: $(VENV)/installed-torch

$(VENV)/installed-torch: constraints-torch.txt $(VENV)/installed
	$(PIP_INSTALL) --constraint constraints.txt --requirement constraints-torch.txt
	@touch $@

$(VENV)/installed-docs: constraints-docs.txt $(VENV)/installed
	$(PIP_INSTALL) --constraint constraints.txt --requirement constraints-docs.txt
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed. Install it: apt-get install python3 python3-venv" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Install one and name it: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot create virtual environments. Install the missing part: apt-get install python3-venv" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 2; }

compiler:
	@command -v $(CC) >/dev/null || { echo "No C compiler ($(CC)) was found. Install one: apt-get install gcc" >&2; exit 2; }

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
