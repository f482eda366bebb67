# Two commands on a fresh machine with Python 3.10+ and a C/C++ compiler: `make demo`, `make test`.
PYTHON ?= python3
BIN := .venv/bin
WHEEL_BIN := .venv-wheel/bin
MODELS := qwen2.5-coder-0.5b-instruct smollm2-135m-instruct

.PHONY: demo test check wheel-test models clean

demo: .venv/installed
	$(BIN)/metachunk-edge models pull
	$(BIN)/metachunk-edge chunk tests/data/origin_of_species.txt --max-size 200 --format text

test: check models
	REQUIRE_MODELS=1 $(BIN)/python -m pytest --durations=10
	$(MAKE) wheel-test

check: .venv/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy metachunk_edge tests benchmarks

models: .venv/installed
	for model in $(MODELS); do $(BIN)/metachunk-edge models pull $$model || exit 1; done

# The built wheel in an environment of its own, away from the checkout.
wheel-test: .venv/test-installed
	rm -rf build dist
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv .venv-wheel
	$(WHEEL_BIN)/python -m pip install --quiet "$$(echo dist/*.whl)[test]"
	rm -rf build/wheel-test && mkdir -p build/wheel-test && cp -R tests pyproject.toml build/wheel-test
	cd build/wheel-test && ../../$(WHEEL_BIN)/python -m pytest -q -m "not slow and not model"

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/test-installed: .venv/installed
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

clean:
	rm -rf .venv .venv-wheel build dist *.egg-info
