# Each target sets up all it needs (virtual environment, packages, model file)
# and does nothing twice. PYTHON=... picks the interpreter, VENV=... the
# environment's folder; ARGS=... adds arguments to a command.

VENV ?= .venv
CACHE ?= .cache
WORKDIR ?= runs/quickstart
ARGS ?=
# Tests spend most of their time compiling, so compiled code is not optimised.
TEST_XLA_FLAGS ?= --xla_backend_optimization_level=0
MODEL := $(CACHE)/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf
BIN := $(VENV)/bin

.PHONY: help quickstart test lint docs clean
.DELETE_ON_ERROR:
# The targets share one environment, so `make -j` must not build them at once.
.NOTPARALLEL:

help:
	@echo "make quickstart   train a 135M language model by RL on this machine"
	@echo "make test         run the tests (ARGS='-k name' selects)"
	@echo "make lint         check formatting, types, layers, spelling and links"
	@echo "make docs         build the documentation as a site in site/"
	@echo "make clean        remove the environment, the cache and runs/"

quickstart: $(VENV)/.train $(MODEL)
	@echo "== training; Ctrl-C saves and stops, the same command resumes"
	@$(BIN)/python -m experiments.train \
	  --config=experiments/configs/quickstart.py --workdir=$(WORKDIR) \
	  --config.model=$(MODEL) $(ARGS)

test: $(VENV)/.dev $(MODEL)
	@echo "== running the tests"
	@LOGRA_MODEL=$(MODEL) XLA_FLAGS="$(TEST_XLA_FLAGS)" $(BIN)/python -m pytest -n auto --maxprocesses 4 \
	  --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.dev
	@echo "== pyink, ruff, mypy, layers of imports, spelling, links"
	@$(BIN)/pyink --check --quiet . || \
	  { echo "run: $(BIN)/pyink ."; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@report=$$($(BIN)/lint-imports --no-logo --no-cache) || \
	  { echo "$$report"; exit 1; }
	@$(BIN)/codespell
	@$(BIN)/python -m pytest tests/integration/links_test.py

docs: $(VENV)/.docs
	@echo "== building site/"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --clean
	@echo "open site/index.html"

clean:
	rm -rf $(VENV) $(CACHE) runs site build dist *.egg-info

# The newest interpreter that is new enough and runs. A name on the PATH is not
# enough: a version manager can leave a shim there without its interpreter.
$(BIN)/python:
	@for python in $(PYTHON) python3.12 python3.11 python3; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    >/dev/null 2>&1; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "Python 3.11 or newer is needed; none of PYTHON='$(PYTHON)'," \
	    "python3.12, python3.11, python3 is one. Install it, or run:" \
	    "make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; \
	fi; \
	echo "== creating $(VENV) with $$($$found --version)"; \
	$$found -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$$found cannot create a virtual environment; on Debian or" \
	    "Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.train: pyproject.toml | $(BIN)/python
	@echo "== installing the packages for training into $(VENV) (a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -e '.[train]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "== installing the packages for tests into $(VENV) (a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -e '.[train,tasks,test,dev,tpu]'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	@echo "== installing the packages for the documentation into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -e '.[docs]'
	@touch $@

$(MODEL): | $(BIN)/python
	@$(BIN)/python -m experiments.models.download --out=$@
