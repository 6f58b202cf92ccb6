# `make demo` and `make test` are all you need on a fresh machine.
PYTHON ?= python3
ARCH ?= $(shell dpkg --print-architecture)
SUITE ?= bookworm
BOARD ?= arm64
MACHINE ?= aarch64
BOARD_PYTHON ?= 3.11
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Bytecode is written, whatever the environment says: four workers import all that the tests need.
export PYTHONDONTWRITEBYTECODE :=

# Two workers more than cores, since many tests wait; each with its own broker; heavy tests start first.
WORKERS := $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 2 )))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo check test tests test-slow test-brokers test-kills soak arm-root test-arm deb test-deb bundle containers test-containers lint coverage mutation bench format clean help

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort

demo: $(VENV)/demo ## Train a fleet privately on this machine; options: make demo ARGS="--devices 8"
	$(BIN)/dpagent demo $(ARGS)

check: lint ## Lint, type-check, check the imports and run the quick tests: the inner loop
	$(PYTEST) -m "not heavy and not slow and not brokers" $(ARGS)

test: $(VENV)/dev ## Lint, and run every test that is not marked slow, side by side
	$(MAKE) --no-print-directory --jobs 2 lint tests

tests: $(VENV)/dev
	$(PYTEST) $(ARGS)

# Each program is executed, where `make test` forks it, and files are on a disk: see Starts and Files in docs/testing.md.
test-slow: $(VENV)/dev ## The slow tests too (half an hour more, on two cores)
	PYTEST_DEBUG_TEMPROOT=$${TMPDIR:-/tmp} $(PYTEST) -m "not brokers" --executed $(ARGS)

test-brokers: $(VENV)/dev ## Whole fleets on each broker that is installed: Mosquitto, RabbitMQ, NATS, amqtt (docs/brokers.md)
	$(BIN)/python -m pytest -m "brokers or not brokers" tests/conformance $(ARGS)

test-kills: $(VENV)/dev ## A thousand kills of programs and brokers: make test-kills ARGS="--kills 1000 --seed 7"
	PYTHONPATH=tests:. $(BIN)/python -m crash.long $(ARGS)

soak: $(VENV)/dev ## A day of a fleet on fast clocks: does what it takes stay flat? make soak ARGS="--hours 24 --factor 60"
	PYTHONPATH=tests:. $(BIN)/python -m soak.long $(ARGS)

arm-root: ## Make an emulated ARM board in build (as root; five minutes, 900 MB): make arm-root BOARD=armhf
	packaging/arm/make-root build/$(BOARD) $(BOARD)

test-arm: $(VENV)/dev arm-root ## Jobs and tests on emulated Cortex-A53, A72 and A76, or A7 and A8 (BOARD=armhf); as root, 40 minutes or 70: make test-arm ARGS="-k a53-codec"
	ARM_BOARD=$(BOARD) $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or not slow" tests/arm $(ARGS)

deb: ## The Debian package, into dist (as root): make deb ARCH=arm64 SUITE=bookworm, ARCH=armhf SUITE=trixie
	packaging/deb/build $(ARCH) $(SUITE)

test-deb: $(VENV)/dev deb ## The Debian package in a clean root, and every command of docs/boards.md (as root): make test-deb ARCH=arm64
	PACKAGE_ARCHITECTURE=$(ARCH) $(BIN)/python -m pytest -m "slow or not slow" tests/packaging $(ARGS)

bundle: $(VENV)/bin/python ## Wheels for a board without internet, into dist: make bundle MACHINE=aarch64 BOARD_PYTHON=3.11
	BUNDLE_PYTHON=$(BIN)/python packaging/bundle $(MACHINE) $(BOARD_PYTHON)

containers: ## Container images of agent, coordinator and mixer, in build/containers (as root; needs buildah, podman, runc, mmdebstrap)
	packaging/containers/build build/containers $(ARCH)

test-containers: $(VENV)/containers containers ## A fleet of containers, the images, the manifest for Kubernetes (as root; needs podman-compose and catatonit too)
	$(BIN)/python -m pytest -m "slow or not slow" tests/containers $(ARGS)

lint: $(VENV)/dev ## ruff, mypy --strict and the import contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

coverage: $(VENV)/dev ## Which lines and branches the tests reach; build/coverage/html has the pages
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest -n $(WORKERS) --dist worksteal $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report

mutation: $(VENV)/mutation ## Which changes of the code no test notices: make mutation ARGS="dpagent.protocol.topics*"
	$(BIN)/mutmut run $(ARGS)
	$(BIN)/mutmut results

bench: $(VENV)/dev ## Run the benchmarks; writes benchmarks/figures.json and docs/benchmarks.md
	$(BIN)/python -m benchmarks $(ARGS)

format: $(VENV)/dev ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove everything that the commands above created
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache mutants

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; give it as: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	@touch $@

$(VENV)/dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	# Python compiles modules on import; compiling all of them here takes a third of the time.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/demo

$(VENV)/containers: $(VENV)/dev
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[containers]'
	@touch $@

$(VENV)/mutation: $(VENV)/dev
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[mutation]'
	@touch $@
