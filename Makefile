# Thin on purpose: each target is a few commands that can be typed by hand.
#   make quickstart   install, train on embedded data, evaluate, translate a handful, write the report
#   make docs         the documentation site, in build/site
#   make test-fast    a part of the tests in less than a minute, for each change
#   make test-all     the slow tests too: before a release, and on the public forge
#   make test lint    PYTHON chooses the interpreter of a new environment, VENV its folder
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all test-fast goldens lint format bench lock package docs

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN := runs/quickstart
WORKERS ?= auto
TESTS ?= tests

help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/.installed: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed")'
	$(BIN)/uv --version >/dev/null 2>&1 || $(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python -m jaxformer train --config=configs/quickstart.py --workdir=$(RUN)
	$(BIN)/python -m jaxformer evaluate --workdir=$(RUN) --split=test
	printf '%s\n' 'seven' 'forty-two' 'one hundred and sixteen' 'nine hundred and ninety-nine' > $(RUN)/handful.txt
	$(BIN)/python -m jaxformer decode --workdir=$(RUN) --input=$(RUN)/handful.txt --output=$(RUN)/handful.out.txt
	paste -d '=' $(RUN)/handful.txt $(RUN)/handful.out.txt | sed 's/=/  ->  /'
	$(BIN)/python -m jaxformer report --workdir=$(RUN)

# All but those in tests/slow.txt. Every planted mistake (benchmarks/mutants.py) is caught by one of these.
test: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist=worksteal -m "not slow" $(TESTS)

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist=worksteal $(TESTS)

# For each change: tests of every room that need no long run, in less than a minute on two quiet cores.
test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n 2 --dist=worksteal --durations=5 --durations-min=3 @tests/fast.txt

# Every reference checkpoint in ../shared/hf_goldens and flax_goldens, in everything it holds; does nothing without them.
# And what the explorer shows of a kept model of each imported family.
goldens: $(VENV)/.installed
	GOLDENS=all $(BIN)/python -m pytest -n $(WORKERS) tests/hf/test_goldens.py tests/hf/test_generation.py tests/hf/test_flax_goldens.py \
	    tests/analysis/test_explored_families.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check --python $(VENV) jaxformer

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Those that stand beside the other library need its packages: uv pip install -e '.[bench]'.
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/meshes.py
	$(BIN)/python benchmarks/processes.py
	$(BIN)/python benchmarks/launch_faults.py
	$(BIN)/python benchmarks/fuzz_safetensors.py --seconds=60
	! $(BIN)/python -c 'import torch, transformers' 2>/dev/null || $(BIN)/python benchmarks/loading.py
	! $(BIN)/python -c 'import torch, transformers' 2>/dev/null || $(BIN)/python benchmarks/hugging_face.py

# Wheel and source distribution, installed into an empty environment and tried there.
package: $(VENV)/.installed
	$(BIN)/uv --version >/dev/null
	rm -rf dist build/package
	$(BIN)/uv build --quiet --out-dir dist
	for file in dist/*.whl dist/*.tar.gz; do \
	  $(BIN)/uv venv --quiet --clear --python $(BIN)/python build/package && \
	  $(BIN)/uv pip install --quiet --python build/package/bin/python -r requirements.lock && \
	  $(BIN)/uv pip install --quiet --python build/package/bin/python --no-deps $$file && \
	  (cd build && package/bin/jaxformer --version && package/bin/python -c 'import jaxformer.cli, jaxformer.testing') || exit 1; \
	done

# The documentation site, in build/site; warnings are errors.
docs: $(VENV)/.installed
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c requirements.lock -e '.[docs]'
	$(BIN)/python -m sphinx --fail-on-warning --quiet -b html docs build/site

# One file for all Python versions: the newest jax of each, told apart by markers.
lock: $(VENV)/.installed
	$(BIN)/uv pip compile --quiet --universal --no-emit-index-url --no-header --no-annotate --python-version 3.11 \
	  --extra test -o requirements.lock pyproject.toml
	! grep -nE 'https?:|file:|^-' requirements.lock
