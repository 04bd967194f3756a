# make install | demo | test | test-long | test-gpu | check | format; each makes its own environment in .venv
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)

.PHONY: install demo test test-long test-gpu check format clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "relpos2d needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# real digits through pip, a small Swin with a relative bias table, accuracy on digits it has not seen
demo: install
	$(BIN)/python -m train classify/digits

# all tests; then those of positions and encodings again, each with two sets of parameters, shapes and types checked in every call
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(CORES) --dist worksteal -m "not gpu and not long"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(CORES) --jaxtyping-packages=relpos2d,beartype.beartype --first-and-last \
		-m "not long and not traced" -k "not pair_by_pair" \
		tests/test_positions.py tests/test_encoding.py tests/encodings tests/attention/test_attend.py

# what CI has on a smaller scale: runs killed twenty times, on several processes and machines, more exports: about a quarter of an hour
test-long: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long

# the tests that need a CUDA device and the benchmark on it, on a machine that has one; meant to take under 8 minutes
test-gpu: install
	$(BIN)/python -m pytest -m gpu tests/gpu
	$(BIN)/relpos2d bench quick --device cuda --output runs/bench-gpu

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache mutants
