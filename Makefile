# A fresh clone needs Python 3.11 or newer, gcc (g++ for the native backend) and make; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Byte code is compiled when a module is first imported, not for all of torch at once.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
TORCH := $(shell grep '^torch==' requirements-dev.txt)
PROJECTS := $(wildcard pyproject.toml core/pyproject.toml plugins/*/pyproject.toml backends/*/pyproject.toml)
NATIVE := $(wildcard backends/*/CMakeLists.txt backends/*/src/native/*)
RUN := runs/demo
# Where it is set, as in many containers, every process that a test starts would compile torch and us once more.
unexport PYTHONDONTWRITEBYTECODE
RESULTS := benchmarks/results

.PHONY: demo test test-all test-extended test-interpreted test-alone lint docs dist generate bench gpu gpu-compile gpu-offline sanitize clean

# Train the demo model, draw its curve, let it write. Interrupted, the next `make demo` continues it. The config leaves
# the backend open, and the native one goes before torch's where it could be built: `make demo COMPILER=` builds none.
demo: $(VENV)/runtime
	@echo "The demo trains for about seven minutes on two cores; Ctrl-C saves, and make demo continues."
	$(if $(COMPILER),@$(MAKE) --no-print-directory $(VENV)/native || echo "$(UNBUILT)",@echo "$(ABSENT)")
	$(BIN)/arb train docs/examples/demo.yaml --run-dir $(RUN) --resume
	$(BIN)/arb plot $(RUN) --output $(RUN)/loss.png
	$(BIN)/arb generate $(RUN) --prompt "MACBETH." --max-new-tokens 400 --temperature 0.8 --top-p 0.9 --seed 0
	@echo "To use arb here: . $(BIN)/activate"

test: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu and not interpreted and not extended"
	$(MAKE) --no-print-directory -j 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync) test-interpreted lint

test-all: test test-extended

# What `make test` leaves out: every option, every instruction set times every shape, all combinations.
test-extended: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal \
	  -m "extended and not slow and not gpu and not interpreted"
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal \
	  -m "extended and interpreted and not slow and not gpu" backends/arb-ternary-triton

# Triton's interpreter is chosen for a whole process, at its start. Beside it, lint uses the core that would be idle.
test-interpreted: $(VENV)/dev
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal \
	  -m "interpreted and not slow and not gpu and not extended" backends/arb-ternary-triton

# Every distribution's tests, each in an environment that holds what it declares and nothing else of this repository.
test-alone: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 tests/packaging -m slow

lint: $(VENV)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/sizes.py --check > /dev/null
	$(BIN)/python scripts/version.py --check
	$(BIN)/mypy

docs: $(VENV)/dev
	$(BIN)/mkdocs build --strict

# Wheels and source archives of all distributions, as they are released.
dist: $(VENV)/dev
	rm -rf dist
	set -e; for project in $(PROJECTS); do \
	  RELEASE=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m build --no-isolation --outdir dist $$(dirname $$project); \
	done > $(VENV)/dist.log 2>&1 || { tail -20 $(VENV)/dist.log; exit 1; }
	$(BIN)/twine check --strict dist/*

# Rewrite what is generated and compared: measured tables and the list of the public surface.
generate: $(VENV)/dev
	$(BIN)/python docs/scripts/measurements.py --write
	$(BIN)/python tests/surface/surface.py --write
	$(BIN)/python tests/gpu/triton_shapes.py --write

# The demo model, the same without vectors, with float ones, and with float embedding and head, against quantisation-aware
# training and float32: three seeds each, one table. `make generate` puts it into the pages.
DEMOS := demo.yaml plain.yaml vectors.yaml float-ends.yaml bitnet.yaml float32.yaml
bench: $(VENV)/dev
	$(BIN)/python benchmarks/compare.py $(addprefix docs/examples/,$(DEMOS)) --out $(RESULTS)/demo.json

# What needs a GPU: the tests, then every kernel beside those of torch and of installed peers, and the GPU's own limits.
# ARB_TERNARY_TRITON_TUNE=1 make gpu measures tile sizes first, which takes longer. The last shapes exceed the cache.
gpu: $(VENV)/dev
	$(BIN)/python -m pytest -q -m "gpu or (interpreted and not slow)"
	$(BIN)/python benchmarks/kernels.py --device cuda --seconds 0.2 --out $(RESULTS)/gpu-kernels \
	  --shapes 1024x1024,2048x2048,4096x4096,11008x4096,8192x16384,16384x16384

# What GPUs would run, compiled without one: every launch of the test kit, every kernel and its spills, for three GPUs.
gpu-compile: $(VENV)/dev
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --hypothesis-seed=0 -m "slow and not interpreted" \
	  tests/gpu backends/arb-ternary-tilelang/tests/test_conformance.py backends/arb-ternary-tilelang/tests/test_fixed_sizes.py

# On a machine with a GPU, torch and Triton 3.6 or newer and no network: WHEELS is a folder with the wheels that it lacks,
# hatchling among them; with tilelang's and what that needs, its backend takes part. PARTS is some of: facts sanitizer
# tests bytes steps bench; each takes less than ten minutes.
SITE := build/gpu-site
gpu-offline:
	test -d "$(WHEELS)" || { echo "make gpu-offline WHEELS=DIR [PARTS=...]"; exit 2; }
	rm -rf $(SITE)
	$(OFFLINE) $(WHEELS)/*.whl
	PYTHONPATH=$(abspath $(SITE)) $(OFFLINE) --no-build-isolation ./core $(wildcard ./plugins/*) \
	  ./backends/arb-ternary-triton $(if $(wildcard $(WHEELS)/tilelang-*.whl),./backends/arb-ternary-tilelang)
	PYTHONPATH=$(abspath $(SITE)) $(PYTHON) tests/gpu/parts.py $(PARTS)
OFFLINE = $(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target $(SITE)

# The native kernels and their tests with AddressSanitizer and UndefinedBehaviorSanitizer, and random arguments.
sanitize: $(VENV)/dev
	$(MAKE) -C backends/arb-ternary-cpu BIN="$(abspath $(BIN))" sanitize

clean:
	rm -rf $(VENV) dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# --- environments: a stamp file each, renewed when a requirement changes ----------------------------------------------

$(VENV)/torch: requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	touch $@

$(VENV)/runtime: $(VENV)/torch $(PROJECTS)
	$(PIP) "hatchling>=1.26" editables
	$(PIP) --no-build-isolation $(addprefix --editable ,core $(addprefix plugins/arb-ternary-,train text interchange votes))
	$(PIP) --no-build-isolation --no-deps --editable .
	touch $@

# The native backend is compiled, with tools that come from pip. Where there is no C++ compiler it is left out, and its
# tests with it.
COMPILER := $(firstword $(foreach name,c++ g++ clang++,$(shell command -v $(name))))
ABSENT := No C++ compiler: the native backend is not built. Training uses the slower kernels of torch; install g++ for it.
UNBUILT := The native backend could not be built here, see above. Training uses the slower kernels of torch.
$(VENV)/native: $(VENV)/runtime requirements-dev.txt $(NATIVE)
	@echo "Building the native backend with $(COMPILER): about half a minute."
	$(PIP) $$(grep -E '^(cmake|nanobind|ninja|scikit-build-core)[>=]' requirements-dev.txt)
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) --no-build-isolation --no-deps --editable backends/arb-ternary-cpu
	touch $@

$(VENV)/dev: $(VENV)/runtime requirements-dev.txt $(if $(COMPILER),$(VENV)/native)
	$(if $(COMPILER),,@echo "$(ABSENT)")
	grep -v '^-e backends/arb-ternary-cpu' requirements-dev.txt > $(VENV)/requirements.txt
	$(PIP) --no-build-isolation --requirement $(VENV)/requirements.txt
	touch $@
