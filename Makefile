# Two commands set everything up: `make demo` runs the main job, `make test` passes the tests. Both rest on `make setup`.
PYTHON ?= python3
BIN := .venv/bin
DEMO_DB := demo/evoattn.sqlite
DEMO_BUDGET ?= 60s

.PHONY: setup demo test clean

setup: .venv/installed

# --no-deps after the constrained install keeps pip from a second resolution for the editable project itself.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

demo: setup
	rm -rf demo && mkdir demo
	$(BIN)/evoattn search --gpu $$($(BIN)/python -c "from evoattn.gpu import detect_devices; print('auto' if detect_devices() else 'l4')") \
		--budget $(DEMO_BUDGET) --problem seed_h100 --db $(DEMO_DB)
	$(BIN)/evoattn report --limit 5 --db $(DEMO_DB)
	$(BIN)/evoattn report --format html -o demo/report.html --db $(DEMO_DB)
	$(BIN)/evoattn export best -o demo/kernel.cu --db $(DEMO_DB)
	$(BIN)/evoattn reproduce best --db $(DEMO_DB)

test: setup
	$(BIN)/python -m pytest

clean:
	rm -rf .venv demo build
