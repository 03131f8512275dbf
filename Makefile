# Two commands set everything up: `make demo` runs the main job, `make test` passes the tests. Both rest on
# `make setup`.
PYTHON ?= python3
BIN := .venv/bin
DEMO_DB := demo/evoattn.sqlite
DEMO_BUDGET ?= 60s

.PHONY: setup demo lint types fast whole check test exhaustive clean
# Compiled modules are kept, whatever the shell says: the tests start hundreds of processes that import them.
export PYTHONDONTWRITEBYTECODE :=

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

# A GPU that evoattn does not know is hidden, as if there were none.
FIND_GPU := from evoattn.model.gpu import detect_devices as find; \
	print('--gpu auto' if find() and find()[0].spec else '--gpu l4')

demo: setup
	rm -rf demo && mkdir demo
	gpu=$$($(BIN)/python -c "$(FIND_GPU)"); [ "$$gpu" = '--gpu auto' ] || export CUDA_VISIBLE_DEVICES=; \
		$(BIN)/evoattn search $$gpu --budget $(DEMO_BUDGET) --problem seed_h100 --db $(DEMO_DB)
	$(BIN)/evoattn report --limit 5 --db $(DEMO_DB)
	$(BIN)/evoattn report --format html -o demo/report.html --db $(DEMO_DB)
	$(BIN)/evoattn export best -o demo/kernel.cu --db $(DEMO_DB)
	$(BIN)/evoattn reproduce best --db $(DEMO_DB)

PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal

lint: setup
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/python scripts/format_cuda.py --check

types: setup
	$(BIN)/mypy

# Without the tests that import other large libraries (transformers alone takes five seconds), and those of rooms that
# kernels, searches and calls do not depend on. `make test` has them all.
fast: setup
	$(PYTEST) -m 'not slow and not device and not postgres and not browser' \
	  $(addprefix --ignore=tests/,integrations dashboard fleet peers report cheats export cli mutation scripts)

# One process more than cores: some tests wait, for processes and clocks.
whole exhaustive: export PYTEST_XDIST_AUTO_NUM_WORKERS := $(shell echo $$(($$(nproc) + 1)))
whole: setup
	$(PYTEST)

# Before a commit: what takes seconds. mypy runs on one core, so that the tests begin beside it.
check: lint
	@$(MAKE) --no-print-directory --jobs=2 types fast

test: lint
	@$(MAKE) --no-print-directory --jobs=2 types whole

# Also the cases that tests marked `sampled` leave out: some fifteen minutes more. Before a release, and after a change of
# the interpreter or of what all templates share.
exhaustive: lint
	$(PYTEST) --all-cases

clean:
	rm -rf .venv demo build dist .mypy_cache .pytest_cache .ruff_cache
