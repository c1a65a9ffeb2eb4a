# `make quickstart` and `make test` do all of their own set-up on a machine that has Python 3.11 or newer.
# `make quickstart RUNTIME=ray` runs the same job on a Ray cluster, and installs Ray for it.
PYTHON ?= python3
RUNTIME ?= local
VENV := .venv
BIN := $(VENV)/bin
LOCK := engine/versions.lock
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(LOCK)

# A test run starts hundreds of Python processes. Without bytecode files each would compile all of our code again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: env tools bench dist docs quickstart browser fake-clouds-demo test types test-quick test-slow test-long test-properties test-sinks test-gpu gpu-wheels test-clouds test-clouds-run test-clouds-parts test-clouds-long test-clouds-faults test-clouds-faults-runs test-clouds-faults-parts format clean

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

# A source archive, and a wheel made from it: both in dist/. `pip install 'dist/spotrl-VERSION-py3-none-any.whl[engine]'`.
dist: $(BIN)/python
	@rm -rf dist build
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	$(BIN)/python -m build --outdir dist

# The diagrams' program comes from npm, because the site has to work without a network.
MERMAID := docs/javascripts/mermaid.min.js
$(MERMAID):
	@command -v npm > /dev/null || { echo "make docs needs npm, which brings mermaid for the diagrams"; exit 1; }
	@mkdir -p $(@D) build/mermaid
	cd build/mermaid && tar -xzf "$$(npm pack --silent mermaid@11.17.2)" package/dist/mermaid.min.js
	@cp build/mermaid/package/dist/mermaid.min.js $@

$(VENV)/.docs: pyproject.toml $(LOCK) | $(BIN)/python
	@echo "installing what builds the site into $(VENV)"
	$(PIP) --editable '.[docs]'
	@touch $(VENV)/.engine $@

# Builds the site into site/. A broken link, an undocumented field or a page that is not as the code is now fails.
docs: $(VENV)/.docs $(MERMAID)
	$(BIN)/python -m docs.generate --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html is the site's first page"

# Exits 0 when the target was reached, or the held-out score rose by at least .10 before the budget was used up.
quickstart: $(VENV)/.engine $(if $(filter ray,$(RUNTIME)),$(VENV)/.ray)
	@rm -f result.json report.html; \
	$(if $(filter ray,$(RUNTIME)),SPOTRL_RESOURCES__TRAINER__USE_SPOT=false) $(BIN)/spotrl launch sky_yamls/quickstart.yaml --yes --name quickstart-$$(date +%m%d-%H%M%S) --runtime $(RUNTIME) \
	  --on-exit down --result result.json --html report.html; \
	$(BIN)/python -m launcher.report.verdict $$? result.json report.html

# What tests and the fake clouds need beside Python: an SSH server above all. Where it cannot be installed, they say so.
tools:
	@export PATH=$$PATH:/usr/sbin:/sbin; \
	for program in sshd nft rsync sudo ip nsenter unshare; do command -v $$program > /dev/null || missing=1; done; \
	if test -n "$$missing" -a "$$(id -u)" = 0 && command -v apt-get > /dev/null; then \
	  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y openssh-server nftables rsync sudo iproute2 \
	    util-linux; } > /dev/null || true; \
	fi

# The pages of `spotrl ui` are tested in a real browser.
browser:
	@if ! command -v chromium > /dev/null && test "$$(id -u)" = 0 && command -v apt-get > /dev/null; then \
	  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y chromium; } > /dev/null || true; \
	fi

# A run on AWS and Google Cloud from launch to target, on clouds that are fakes (tests/fakes/clouds): nothing is bought.
fake-clouds-demo: env tools
	$(BIN)/python -m tests.clouds.demo --to fake-clouds-demo

# Tests run in this many processes. Half of their time is waiting, so two for each of two cores pay.
WORKERS ?= 4
# Seconds of every test are kept in test-results/; `python -m tests.tiers` holds them against each tier's limit.
PYTEST = $(BIN)/pytest --durations 15 --junitxml test-results/$@.xml

# mypy runs beside the tests, which wait half of the time.
test: env tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --jobs 2 types test-quick

types:
	$(BIN)/mypy

test-quick:
	$(BIN)/pytest --durations 15 --junitxml test-results/test.xml -n $(WORKERS) -m 'not (gpu or clouds or slow or long or report)'

# What takes long or starts real processes, and a landing needs (tests/tiers.md).
test-slow: env tools browser
	$(PYTEST) -n $(WORKERS) -m '(slow or report) and not long'

# What a shorter form of is in the tiers above. `.ci/run` leaves it out, `.ci/nightly` runs it.
test-long: env tools
	$(PYTEST) -n $(WORKERS) -m 'long and not clouds'

# Property tests with new examples in each run, where `make test` always draws the same. A failure prints its example:
# keep it in the test with @example.
test-properties: env tools
	$(PYTEST) -n $(WORKERS) -m 'hypothesis and not slow and not long' --hypothesis-profile new $(if $(SEED),--hypothesis-seed $(SEED))

# W&B and MLflow through their own clients, in an environment without the lock: MLflow wants older packages than it pins.
$(VENV)-sinks/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-sinks
	$(VENV)-sinks/bin/python -m pip install --quiet --disable-pip-version-check \
	  --editable '.[wandb,mlflow]' 'mlflow>=3.1' pillow pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

test-sinks: $(VENV)-sinks/.ready
	$(VENV)-sinks/bin/pytest --durations 15 --junitxml test-results/$@.xml -m slow tests/launcher/cluster/test_sink_clients.py

test-gpu: env tools
	$(PYTEST) -m gpu

# What the GPU checks need beside torch, for a machine that reaches no package index (CONTRIBUTING.md). HAVE=FILE names a
# file with the machine's own packages, GPU_PYTHON its Python.
gpu-wheels: env
	rm -rf .whl
	$(BIN)/python -m tests.gpu.wheels .whl $(if $(HAVE),--have $(HAVE)) --python $(or $(GPU_PYTHON),3.12)

# Everything that no page of a GPU has, in the order of its value: 25 minutes at most, and again to go on. Needs no package
# index: without a `.venv`, the wheels of `make gpu-wheels` are unpacked. PROOF=--narrow tries all of it on the CPU.
.PHONY: gpu-proof
gpu-proof:
ifneq ($(wildcard $(BIN)/python),)
	$(BIN)/python -m tests.gpu.proof $(PROOF)
else
	@if test -d .whl && ! test -d .whl/site; then \
	  rm -rf .whl/part && \
	  $(PYTHON) -m pip install --quiet --no-index --no-deps --target .whl/part .whl/*.whl && mv .whl/part .whl/site; fi
	PYTHONPATH=.whl/site:. $(PYTHON) -m tests.gpu.proof $(PROOF)
endif

# Much of it waits for what takes minutes by itself, so that two of them fill two cores. Each has a world of its own.
test-clouds: env tools
	@$(MAKE) --no-print-directory --jobs 2 test-clouds-run test-clouds-parts

# Together about as long as all the others in tests/clouds.
FIRST_HALF := tests/clouds/test_run.py tests/clouds/test_takeover.py

test-clouds-run:
	$(PYTEST) -v -m 'clouds and not long' --timeout 900 $(FIRST_HALF)

test-clouds-parts:
	$(PYTEST) -v -m 'clouds and not long' --timeout 900 tests/clouds $(addprefix --ignore ,$(FIRST_HALF) $(FAULTS_OF_RUNS) $(FAULTS_OF_PARTS) $(SELFTESTS) $(FAULTS_OF_SELFTESTS))

# Nodes in resources that a job names, and engines across hosts without a cloud; then half an hour of everything at once
# on both clouds, side by side. `.ci/run` leaves it out.
EVERYTHING := tests/clouds/test_everything_at_once.py

.PHONY: test-clouds-everything-aws test-clouds-everything-gcp
test-clouds-long: env tools
	$(PYTEST) -v -m 'clouds and long' --timeout 900 tests/clouds tests/engine/test_hosts.py --ignore $(EVERYTHING)
	@$(MAKE) --no-print-directory --jobs 2 --keep-going test-clouds-everything-aws test-clouds-everything-gcp

test-clouds-everything-aws test-clouds-everything-gcp:
	$(PYTEST) -v -m 'clouds and long' --timeout 5400 $(EVERYTHING) -k $(subst test-clouds-everything-,,$@)

# What seldom happens, to runs and to single nodes. Both halves take most of an hour: `.ci/nightly` runs them. They
# run one after the other: eight nodes set up at once take so long on two cores that runs come to their deadlines.
FAULTS_OF_RUNS := tests/clouds/test_faults.py
FAULTS_OF_PARTS := tests/clouds/test_quota.py tests/clouds/test_bastion.py tests/clouds/test_trainer_nodes.py tests/clouds/test_spot_trainer.py tests/clouds/test_moves.py

test-clouds-faults: env tools
	@$(MAKE) --no-print-directory test-clouds-faults-runs
	@$(MAKE) --no-print-directory test-clouds-faults-parts
	@$(MAKE) --no-print-directory test-clouds-selftest
	@$(MAKE) --no-print-directory test-clouds-selftest-faults

test-clouds-faults-runs:
	$(PYTEST) -v -m clouds --timeout 1500 $(FAULTS_OF_RUNS)

test-clouds-faults-parts:
	$(PYTEST) -v -m clouds --timeout 1500 $(FAULTS_OF_PARTS)

# `spotrl selftest` from launch to cleanup: each takes a whole run with a preemption, a stop and a resume. `-faults`: with
# a fault in each of its steps, and ended by signals; SELFTESTS_AT_ONCE of them (3) run at the same time.
SELFTESTS := tests/clouds/test_selftest.py
FAULTS_OF_SELFTESTS := tests/clouds/test_selftest_ended.py tests/clouds/test_selftest_faults.py

.PHONY: test-clouds-selftest test-clouds-selftest-faults
test-clouds-selftest: env tools
	$(PYTEST) -v -m clouds --timeout 1500 $(SELFTESTS)

test-clouds-selftest-faults: env tools
	$(PYTEST) -v -m clouds --timeout 3600 $(FAULTS_OF_SELFTESTS)

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VENV)-sinks build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis test-results dist site docs/javascripts result.json report.html fake-clouds-demo
