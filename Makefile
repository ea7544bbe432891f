# `make demo` and `make test` do everything, on a machine with Python 3.10-3.13 and nothing else.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
# Two processes for the tests with Ray; three took as long on two cores. A test goes to the process that is free; those
# of a module that share what takes long to make stay together.
# One that fails runs once more, and the summary prints its first failure: CONTRIBUTING.md.
TWO := -n 2 --dist loadgroup --no-loadscope-reorder --reruns 1
# Files with tests of these marks: to import all others as well takes each process a quarter of a minute.
marked = $$(grep -rlE 'mark\.($(1))' tests --include='test_*.py' | sort)
# What `python -m tools.durations` reads.
REPORT := --junitxml=.pytest_cache
# Make runs a line with its own variable even under `make -n`.
AGAIN := $(MAKE)
STAMP := $(VENV)/.installed
EXTRAS := $(VENV)/.extras

.PHONY: demo test test-all fast core lint hooks oldest oldest-installed frameworks-installed test-frameworks rivals-installed gpu ray-suite docs release release-check soak clean

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	# torch first and pinned: an unpinned torch pulls gigabytes of CUDA libraries.
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[dev,serve,client]"
	touch $@

# What site and release need besides. Not while tests run: pip takes the package out and in again.
$(EXTRAS): $(STAMP)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[docs,release]"
	touch $@

demo: $(STAMP)
	$(BIN)/python -m benchmarks.demo --out demo

# What a person waits for: lint, the fast tests, and of each other kind those that are marked core.
test: lint fast core

# All tests, the documentation site and the release's files: the rest on the newest Ray; on the oldest those of tune,
# ray_compat and serving that depend on Ray's version.
test-all: test $(EXTRAS)
	# Meanwhile the oldest Ray is installed, and site and release are built: the tests wait for half of their time.
	$(AGAIN) -s oldest-installed release-check docs & \
	$(BIN)/python -m pytest -m "(ray or faults or slow) and not core" $(call marked,ray|faults|slow) --kills 2 $(TWO) $(REPORT)/rest.xml; \
	status=$$?; wait $$! || status=$$?; exit $$status
	$(MAKE) oldest

# What needs neither Ray nor long, on all cores. Files that are marked as a whole are not imported.
fast: $(STAMP)
	$(BIN)/python -m pytest -m "not ray and not faults and not slow" $$(grep -rLE '^pytestmark = .*mark\.(ray|faults|slow)' tests --include='test_*.py' | sort) -n auto --dist worksteal $(REPORT)/fast.xml

# Real Ray and processes: parity, resizes, restores, lanes, a lease, a service, and a worker that is killed.
core: $(STAMP)
	$(BIN)/python -m pytest -m "core" $(call marked,core) --kills 1 $(TWO) $(REPORT)/core.xml

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.ray_boundary
	$(BIN)/python -m tools.house_rules
	$(BIN)/python -m tools.reach
	$(BIN)/python -m tools.size

# Run `make lint` before each commit.
hooks: $(STAMP)
	$(BIN)/pre-commit install

oldest-installed:
	$(MAKE) .venv-oldest/.installed VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

oldest: oldest-installed
	.venv-oldest/bin/python -m pytest tests/tune tests/ray_compat tests/serving -m "not faults and not newest" $(TWO) $(REPORT)/oldest.xml

# Trials of other people's frameworks beside stock Ray Tune, in an environment of their own (2 GB).
frameworks-installed:
	$(MAKE) .venv-frameworks/.installed VENV=.venv-frameworks
	.venv-frameworks/bin/python -m pip install -q -c $(CONSTRAINTS) -r benchmarks/frameworks/requirements.txt

# The rivals of `benchmarks.serve_http` that cannot be installed beside Ray (BentoML wants another OpenTelemetry).
rivals-installed:
	$(PYTHON) -m venv .venv-rivals
	.venv-rivals/bin/python -m pip install -q -c $(CONSTRAINTS) torch numpy
	.venv-rivals/bin/python -m pip install -q bentoml==1.4.40 litserve==0.2.19

test-frameworks: frameworks-installed
	.venv-frameworks/bin/python -m pytest -m "frameworks or trackers" tests/frameworks

# All that needs a GPU, in less than half an hour; gpu-report/README.md says what held. It uses the Python of GPU_PYTHON,
# which must have torch with CUDA and fluidtune[dev]. REHEARSE=1: the same on two cores, which measures nothing.
# BUDGET: seconds for all parts, if there is less than half an hour; the page is on disk after each part.
GPU_PYTHON ?= $(PYTHON)
gpu: $(if $(REHEARSE),$(STAMP))
	$(if $(REHEARSE),$(BIN)/python,$(GPU_PYTHON)) -m benchmarks.gpu $(if $(REHEARSE),--rehearse) $(if $(BUDGET),--budget $(BUDGET))

# Ray Tune's own tests, under stock and under FluidTune: docs/ray-suite.md. RAY: a checkout of Ray's repository.
ray-suite: $(STAMP)
	$(BIN)/python -m tools.ray_suite $(RAY) $(FILES)

# The documentation site, strictly: docs/_build/html/index.html, and llms.txt beside it.
docs: $(EXTRAS)
	$(BIN)/python -m sphinx -W --keep-going -n -E -q docs docs/_build/html

# The sdist and the wheel in dist/, and the README's commands with the wheel alone. TAG: that of the release.
release-check: $(EXTRAS)
	$(BIN)/python -m tools.release $(if $(TAG),--tag $(TAG))

# A release of the changelog's unreleased changes: make release VERSION=0.2.0. Nothing is committed or published.
release: $(EXTRAS)
	$(BIN)/python -m tools.release --cut $(VERSION)

# Four tenants and a service for an hour, while everything is killed.
soak: $(STAMP)
	$(BIN)/python -m tests.faults.soak --minutes $(or $(MINUTES),60)

clean:
	rm -rf dist $(VENV) .venv-oldest .venv-frameworks .venv-rivals demo gpu-report docs/_build docs/reference/api docs/gallery
