# Everything runs in one virtual environment that `make install` builds from nothing but python3.
#
# pip's own settings apply. Where the package index in use offers only the CUDA build of torch and there is no GPU,
# set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds: `make` passes it on. With a GPU, choose torch's build
# freely: `pip install '.[train]'` takes ranges from setup.cfg and none of the versions pinned in constraints.txt.

PYTHON ?= python3
VENV ?= .venv
# Options that shrink the recipe to a run of CI's size: what comes out can say little, but every stage runs.
SHORT ?= --data.block 64 --data.heldout 0.05 --trunk_training.steps 100 --trunk_training.warmup 10 \
  --heads_training.steps 60 --heads_training.warmup 10 --evaluation.prompts 16 --evaluation.tokens 48 \
  --calibration.sizes [1,4,8,16] --calibration.rounds 10
SHORT_BENCH ?= --prompts 4 --max-new-tokens 64 --repeats 1

BIN := $(VENV)/bin
RUN := runs/tinyshakespeare
SHORT_RUN := runs/ci
PROMPT := ROMEO:
QUESTION := Explain in simple words why the sky is blue.

.DEFAULT_GOAL := help
.PHONY: help install demo demo-short demo-chat test test-slow test-all lint format types clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

install: $(VENV)/.installed ## make the virtual environment and install the package with all that the targets need

# The stamp is written last: an installation that broke off is done again.
$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: install ## train on tinyshakespeare, decode, print and plot the report
	$(BIN)/medusa data tinyshakespeare
	$(BIN)/medusa train configs/tinyshakespeare.yaml
	$(BIN)/medusa bench $(RUN)
	$(BIN)/medusa generate $(RUN) --prompt "$(PROMPT)" --max-new-tokens 200

demo-short: install ## the demo in small, as CI runs it
	$(BIN)/medusa data tinyshakespeare
	$(BIN)/medusa train configs/tinyshakespeare.yaml --run $(SHORT_RUN) $(SHORT) --fresh
	$(BIN)/medusa bench $(SHORT_RUN) $(SHORT_BENCH)
	$(BIN)/medusa generate $(SHORT_RUN) --prompt "$(PROMPT)" --max-new-tokens 40

demo-chat: install ## SmolLM2-135M answers, with the heads that ship with the package and without
	$(BIN)/medusa chat smollm2 --message "$(QUESTION)" --max-new-tokens 100
	$(BIN)/medusa chat smollm2 --message "$(QUESTION)" --max-new-tokens 100 --baseline

test: install ## run the fast tests
	$(BIN)/python -m pytest -m "not slow" -n 2

# A worker takes whole files: the tests of one share runs, a wheel and compiled steps.
test-slow: install ## run the slow tests
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile

test-all: install ## run all tests
	$(BIN)/python -m pytest

lint: install ## check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: install ## put style and format right
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: install ## check types
	$(BIN)/mypy

clean: ## remove the environment, builds and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
