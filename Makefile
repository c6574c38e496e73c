# Two commands set everything up on a fresh machine: make demo, make test.
PYTHON ?= python3
BIN := .venv/bin

FACTOR := 1

.PHONY: demo test test-all test-faults test-scale load attack check fmt docs setup
setup: .venv/test

# A demo needs little; what tests need is added to the same environment.
.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve]'
	touch $@

.venv/test: .venv/demo
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: .venv/demo
	$(BIN)/sedem demo

# Tensors of tests are small: they gain from processes, not from threads. A process takes neighbours, which
# share what was made for them, and then of what others have left.
test: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

# All but the campaigns below: also what is marked slow.
test-all: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal -m "not gpu"

# Bounded; the long form is FACTOR=20. REPORT=--report renews experiments/faults.md.
test-faults: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m faults $(FACTOR) $(if $(ONLY),--only "$(ONLY)") $(REPORT)

# Bounded; the long form is FACTOR=5. REPORT=--report renews experiments/scale.md. Hosts need root.
test-scale: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python -m scale $(FACTOR) $(if $(ONLY),--only "$(ONLY)") $(REPORT)

# Bounded, over loopback alone; the long form is FACTOR=5. REPORT=--report renews experiments/load.md.
load: setup
	HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python -m load $(FACTOR) $(if $(ONLY),--only "$(ONLY)") $(REPORT)

# At full size, over loopback alone. REPORT=--report renews the second table of experiments/faults.md.
attack: setup
	HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python -m hostile $(FACTOR) $(if $(ONLY),--only "$(ONLY)") $(REPORT)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(MAKE) docs

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# A broken link or a name that is documented twice fails.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/docs: .venv/demo
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@
