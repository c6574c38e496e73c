# Two commands set everything up on a fresh machine: make demo, make test.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check fmt docs setup
setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: setup
	$(BIN)/sedem demo

# Tensors of tests are small: they gain from processes, not from threads.
test: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n logical --maxprocesses 4

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

.venv/docs: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@
