# `make quickstart` and `make test` do all of their own set-up on a machine that has Python 3.11 or newer.
# `make quickstart RUNTIME=ray` runs the same job on a Ray cluster, and installs Ray for it.
PYTHON ?= python3
RUNTIME ?= local
VENV := .venv
BIN := $(VENV)/bin
LOCK := engine/versions.lock
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(LOCK)

.PHONY: env tools bench quickstart fake-clouds-demo test test-slow test-gpu test-clouds test-clouds-runs test-clouds-parts format clean

env: $(VENV)/.everything

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "spotrl needs Python 3.11 or newer; name one: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip

# Only what the main job needs: no cloud SDK, no Ray.
$(VENV)/.engine: pyproject.toml $(LOCK) | $(BIN)/python
	@echo "installing the engine into $(VENV) (a few minutes the first time)"
	$(PIP) --editable '.[engine]'
	@touch $@

$(VENV)/.everything: pyproject.toml $(LOCK) | $(BIN)/python
	@echo "installing everything into $(VENV) (a few minutes the first time)"
	$(PIP) --editable '.[all]'
	@touch $(VENV)/.engine $(VENV)/.ray $@

$(VENV)/.ray: $(VENV)/.engine
	@echo "installing Ray into $(VENV)"
	$(PIP) --editable '.[engine,ray]'
	@touch $@

# For the exploration benchmark, another recogniser than the reward's. Without what it asks for: an OpenCV with windows,
# which would overwrite the one without.
bench: env
	$(PIP) --no-deps 'rapidocr-onnxruntime==1.4.4'

quickstart: $(VENV)/.engine $(if $(filter ray,$(RUNTIME)),$(VENV)/.ray)
	$(BIN)/spotrl launch sky_yamls/quickstart.yaml --yes --name quickstart-$$(date +%m%d-%H%M%S) --runtime $(RUNTIME) \
	  --on-exit down --result result.json --html report.html
	@echo "The report is in report.html, its figures in result.json."

# What tests and the fake clouds need beside Python: an SSH server above all. Where it cannot be installed, they say so.
tools:
	@export PATH=$$PATH:/usr/sbin:/sbin; \
	for program in sshd nft rsync sudo ip nsenter unshare; do command -v $$program > /dev/null || missing=1; done; \
	if test -n "$$missing" -a "$$(id -u)" = 0 && command -v apt-get > /dev/null; then \
	  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y openssh-server nftables rsync sudo iproute2 \
	    util-linux; } > /dev/null || true; \
	fi

# A run on AWS and Google Cloud from launch to target, on clouds that are fakes (tests/fakes/clouds): nothing is bought.
fake-clouds-demo: env tools
	$(BIN)/python -m tests.clouds.demo --to fake-clouds-demo

test: env tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

# What takes minutes, what needs a GPU, and what needs root and network namespaces.
test-slow test-gpu: env
	$(BIN)/pytest -m $(@:test-%=%)

# Much of it waits for what takes minutes by itself, so that two of them fill two cores. Each has a world of its own.
test-clouds: env tools
	@$(MAKE) --no-print-directory --jobs 2 test-clouds-runs test-clouds-parts

test-clouds-runs:
	$(BIN)/pytest -v -m clouds --timeout 900 --durations 10 tests/clouds/test_faults.py

test-clouds-parts:
	$(BIN)/pytest -v -m clouds --timeout 900 --durations 10 tests/clouds tests/engine/test_hosts.py --ignore tests/clouds/test_faults.py

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis result.json report.html fake-clouds-demo
