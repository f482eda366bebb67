# Two commands on a fresh machine with Python 3.10+ and a C/C++ compiler: `make demo`, `make test`.
PYTHON ?= python3
BIN := .venv/bin
WHEEL_BIN := .venv-wheel/bin
MODELS := qwen2.5-coder-0.5b-instruct smollm2-135m-instruct

VULKAN_BIN := .venv-vulkan/bin
# Of llama-cpp-python; later ones do not compile against the Vulkan headers of Debian 12.
VULKAN_VERSION := 0.3.16
VULKAN_WHEELS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/metachunk-edge-wheels/vulkan-$(VULKAN_VERSION)

.PHONY: demo test check wheel-test vulkan-test models clean

demo: .venv/installed
	$(BIN)/metachunk-edge models pull
	$(BIN)/metachunk-edge chunk tests/data/origin_of_species.txt --max-size 200 --format text

test: check models
	REQUIRE_MODELS=1 $(BIN)/python -m pytest --durations=10
	$(MAKE) wheel-test

check: .venv/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/python -m pip install --quiet --no-deps --target build/typed .  # mypy cannot follow an editable installation
	MYPYPATH=build/typed:tests $(BIN)/mypy build/typed/metachunk_edge tests benchmarks

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

# The GPU code path on Mesa's software Vulkan device, which llama.cpp takes for a GPU only where this variable names it.
vulkan-test: .venv-vulkan/installed
	$(VULKAN_BIN)/metachunk-edge models pull smollm2-135m-instruct
	REQUIRE_GPU=1 GGML_VK_VISIBLE_DEVICES=0 $(VULKAN_BIN)/python -m pytest tests/parity/test_gpu.py --durations=10

# pip's own wheel cache ignores CMAKE_ARGS and would hand back a build for the CPU.
.venv-vulkan/installed: pyproject.toml
	$(PYTHON) -m venv .venv-vulkan
	install="$(VULKAN_BIN)/python -m pip install --quiet --no-index --no-deps --find-links $(VULKAN_WHEELS) llama-cpp-python==$(VULKAN_VERSION)"; \
	$$install 2> /dev/null || { \
		CMAKE_ARGS=-DGGML_VULKAN=on $(VULKAN_BIN)/python -m pip wheel --quiet --no-cache-dir --no-deps \
			--no-binary llama-cpp-python --wheel-dir $(VULKAN_WHEELS) llama-cpp-python==$(VULKAN_VERSION) && $$install; \
	}
	$(VULKAN_BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[onnx]"
	touch $@

.venv/test-installed: .venv/installed
	$(BIN)/python -m pip install --quiet --editable ".[test,convert]"
	touch $@

clean:
	rm -rf .venv .venv-wheel .venv-vulkan build dist *.egg-info
