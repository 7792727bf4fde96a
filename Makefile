# Every target makes the virtual environment it needs, once; a change of pyproject.toml or of the pins renews it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread per worker: two workers with two threads each are slower on two cores than two with one. A worker keeps to
# its part of the tests, and so to the fixtures of few modules, until it helps the other with the rest.
WORKERS ?= 2
PYTEST_ARGS ?=
# Images for containers often forbid Python to keep what it has compiled. Then each of the many processes of the tests
# would compile the modules of torch anew, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal


# The environment of `make test-integrations`: other people's programs, too many for the one of `make test`.
INTEGRATIONS := .venv-integrations

.PHONY: demo test test-all test-integrations bench docs package lint format clean

demo: $(VENV)/.lab
	@echo 'Some ninety short runs on digits: a bar names the run and says how long the rest takes.'
	@$(BIN)/equinorm demo

test: lint
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: lint
	$(PYTEST) $(PYTEST_ARGS)

# The log is what docs/integrations.md is made of: scripts/integrations_table.py.
test-integrations: $(INTEGRATIONS)/.installed
	mkdir -p out
	bash -o pipefail -c 'OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest --no-header tests/integrations $(PYTEST_ARGS) \
		| tee out/integrations.txt'

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/equinorm bench

# Warnings are errors, the tutorials are executed, and links within the site are followed.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site
	$(BIN)/python scripts/check_site.py build/site
	@echo "Written: build/site/index.html"

# The wheel, and what a user sees who installs it: without extras, then with those of the demo.
package: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python scripts/try_wheel.py dist/*.whl

clean:
	rm -rf $(VENV) $(INTEGRATIONS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@echo 'Making an environment in $(VENV), once. torch is a large download: this takes some minutes.'
	@$(PYTHON) -m venv $(VENV)

# The constraints file keeps every install at the versions the tests run with, torch's CPU build among them. Modules are
# compiled when they are first imported: to compile all of them here would take a third of the time.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# A torchvision built for CUDA is made to work beside the CPU build of torch, if it is there.
TORCHVISION := scripts/torchvision_ops.py
$(VENV)/.lab: pyproject.toml constraints.txt $(TORCHVISION) | $(BIN)/python
	$(INSTALL) --editable '.[lab]'
	$(BIN)/python $(TORCHVISION)
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(TORCHVISION) | $(BIN)/python
	$(INSTALL) --editable '.[lab,dev]'
	$(BIN)/python $(TORCHVISION)
	touch $@ $(VENV)/.lab

$(VENV)/.docs: $(VENV)/.lab
	$(INSTALL) --editable '.[lab,docs]' timm torchvision
	$(BIN)/python $(TORCHVISION)
	touch $@

$(INTEGRATIONS)/.installed: pyproject.toml constraints-integrations.txt $(TORCHVISION)
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --no-compile --constraint constraints-integrations.txt --editable '.[integrations]'
	$(INTEGRATIONS)/bin/python $(TORCHVISION)
	touch $@
