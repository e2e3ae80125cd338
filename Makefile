# One command for each thing. `make demo` and `make test` set up all they need.
PY ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
# Tests and benchmarks start hundreds of Python processes. Where nothing may be cached, each compiles Ostler anew (0.4 s of CPU).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup system demo test test-models check lint types format bench soak clean

setup: $(STAMP)

# The stamp is older than pyproject.toml or constraints.txt only when they changed, so a second `make setup` does nothing.
$(STAMP): pyproject.toml constraints.txt scripts/setup
	PY="$(PY)" scripts/setup
	@touch $(STAMP)

system: setup
	scripts/system

demo: setup
	$(BIN)/ostler demo

test: setup system
	scripts/test

# Installs torch, twice, and TensorFlow: the environments that need them are built in .venv-models. Downloads 150 MB of music.
test-models: setup
	$(BIN)/python -m pytest tests/apps/test_models.py tests/apps/music/test_reference.py -m "models or not models"

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

check: lint types test

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python benchmarks/jobs.py
	$(BIN)/python benchmarks/live.py
	$(BIN)/python benchmarks/calls.py --quick --overload 5
	$(BIN)/python benchmarks/sessions.py --quick

soak: setup
	$(BIN)/python -m pytest -m soak

clean:
	rm -rf .venv .venv-models .pytest_cache .mypy_cache .ruff_cache .ostler .ostler-demo
