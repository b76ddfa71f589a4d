# Two commands do everything, set-up included: `make example` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help install example test lint clean

help:
	@echo "make example   set up, build a pack from the embedded example model, verify it, show the report"
	@echo "make test      set up, run every test (make test ARGS='-m \"not slow\"' leaves out the long ones)"
	@echo "make lint      ruff and mypy"

SOURCES := $(shell find core quantize calibrate placement packs fidelity cli \( -name '*.py' -o -name '*.cpp' -o -name '*.h' \))
PIP := $(BIN)/python -m pip --disable-pip-version-check

# PyTorch's CPU build is taken where the configured package index has it. Elsewhere the default build (CUDA, several GB)
# works as well; CI refuses to download it.
$(VENV)/ready: pyproject.toml CMakeLists.txt constraints.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt --upgrade pip
	$(PIP) install --quiet -c constraints.txt torch==2.13.0+cpu || test -z "$$CI"
	$(PIP) install --quiet -c constraints.txt --build-constraint constraints.txt ".[test,lint]"
	touch $@

install: $(VENV)/ready

example: install
	rm -rf example-pack example-pack.partial
	$(BIN)/moefit inspect examples/tiny-v41
	$(BIN)/moefit build examples/tiny-v41 --traces examples/traffic.jsonl --eval examples/eval.jsonl \
	  --copies 0 --gpu 8MB --gpu 8MB --host 64MB --max-kl 0.12 --out example-pack
	$(BIN)/moefit verify example-pack
	$(BIN)/moefit report example-pack

test: install
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(VENV) && bin/python -m mypy --config-file ../pyproject.toml -p moefit

clean:
	rm -rf $(VENV) build dist example-pack example-pack.partial .pytest_cache .ruff_cache .mypy_cache
