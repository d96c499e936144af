# Every target sets up what it needs: a virtual environment in .venv with a
# Python >= 3.12 and the versions of constraints.txt.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CUDA_STAMP := $(VENV)/.installed-cuda
# lm-evaluation-harness is half a gigabyte and takes minutes to install, so only
# the target that needs it waits for it.
EVAL_STAMP := $(VENV)/.installed-eval
# The compiler for CUDA has its own folder. If JAX found it without CUDA's
# libraries, every command that does not name its platform would warn.
COMPILER := $(VENV)/compiler
COMPILER_STAMP := $(COMPILER)/.installed
TPU_COMPILER := $(VENV)/libtpu
TPU_STAMP := $(TPU_COMPILER)/.installed
PIP := $(PY) -m pip install --quiet --disable-pip-version-check \
  --constraint constraints.txt
CHECK := import sys, venv, ensurepip; assert sys.version_info >= (3, 12)
EXTRAS := train,vision,test,lint,docs

# More arguments for `make train` and the tests, for example
# `make train ARGS="--steps 50"` or `make test ARGS="-k qtensor"`.
ARGS ?=

# With an NVIDIA GPU, `make train` installs JAX with CUDA and trains on it.
# `make train GPU=` does neither.
GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
READY := $(if $(GPU),$(CUDA_STAMP),$(STAMP))
PRESET := $(if $(GPU),demo_gpu,demo)
ifeq ($(origin GPU)$(GPU),command line)
train: export JAX_PLATFORMS := cpu
endif

# Make .venv again if its Python no longer runs (upgraded, moved).
ifneq ($(wildcard $(STAMP)),)
ifneq ($(shell $(PY) -c 'print("ok")' 2>/dev/null),ok)
$(shell rm -f $(STAMP))
endif
endif

.PHONY: help train test test-all test-aot test-tpu test-gpu test-eval \
  test-versions test-integrations lint docs package clean

help:
	@echo 'make train     train a small model in FP8 and in BF16, and compare them'
	@echo 'make test      run the quick tests on the CPU'
	@echo 'make test-all  run all tests on the CPU, including slow ones'
	@echo 'make test-aot  compile for GPUs (none are needed) and check the programs'
	@echo 'make test-tpu  compile for TPUs (none are needed) and check the programs'
	@echo 'make test-gpu  run the tests that need an NVIDIA GPU'
	@echo 'make test-eval run the tests that need lm-evaluation-harness'
	@echo 'make test-versions  run the tests on the oldest and newest JAX'
	@echo 'make test-integrations  train with our optimizer in other frameworks'
	@echo 'make lint      check style (ruff) and types (pyright)'
	@echo 'make docs      build the documentation into site/; warnings are errors'
	@echo 'make package   build the wheel, check it, install it and import it'
	@echo 'make clean     remove .venv and caches'
	@echo
	@echo 'Each sets up .venv with a Python >= 3.12 that it finds, or with'
	@echo 'PYTHON=/path/to/python. Pass more arguments with ARGS="...".'
	@echo 'If nvidia-smi works, make train installs CUDA and uses the GPU.'

# If the driver is too old for JAX's CUDA, JAX would train on the CPU, where a
# step of this preset takes minutes.
define check_gpu
@$(PY) -c 'import jax; exit(jax.default_backend() != "gpu")' || { \
  echo 'nvidia-smi works, but JAX finds no GPU: CUDA 13 needs a driver of' \
    'version 580 or newer. `make train GPU=` trains on the CPU.' >&2; exit 1; }
@echo 'NVIDIA GPU: training $(PRESET) on it (`make train GPU=` trains on the CPU)'
endef

# Starts again each time and replaces the previous demo run. With --out, no run is
# replaced unasked; with --resume, the run continues.
train: $(READY)
	$(if $(GPU),$(check_gpu))
	$(PY) -m train.pretrain $(PRESET) --compare bf16 \
	  $(if $(findstring --resume,$(ARGS))$(findstring --out,$(ARGS)),,--overwrite) \
	  $(ARGS)

# All processes of a test run share a cache of compiled programs, which starts
# empty. tests/conftest.py sets how they are compiled.
PYTEST := $(PY) -m pytest -n 2 --dist worksteal --durations=10
define run_tests
	@set -e; cache=$$(mktemp -d); trap 'rm -rf "$$cache"' EXIT; \
	JAX_PLATFORMS=cpu \
	JAX_COMPILATION_CACHE_DIR="$$cache" \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=0 \
	$(PYTEST) $(2) -m '$(1)' $(ARGS)
endef

# Checks the types of arguments and results at run time, which takes long enough
# to leave it to test-all.
TYPES := --jaxtyping-packages=coat_jax,beartype.beartype

test: $(STAMP)
	$(call run_tests,not slow and not aot and not tpu and not gpu)

test-all: $(STAMP)
	$(call run_tests,not aot and not tpu and not gpu,$(TYPES))

test-aot: $(COMPILER_STAMP)
	PYTHONPATH="$(CURDIR)/$(COMPILER)$${PYTHONPATH:+:$$PYTHONPATH}" \
	  JAX_PLATFORMS=cpu $(PY) -m pytest -n 2 --dist worksteal --durations=10 -m aot $(ARGS)

# The variable keeps libtpu from asking a server which TPU this is.
test-tpu: $(TPU_STAMP)
	PYTHONPATH="$(CURDIR)/$(TPU_COMPILER)$${PYTHONPATH:+:$$PYTHONPATH}" \
	  TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu \
	  $(PY) -m pytest --durations=10 -m tpu $(ARGS)

test-gpu: $(CUDA_STAMP)
	JAX_PLATFORMS=cuda,cpu $(PY) -m pytest --durations=10 -m gpu $(ARGS)

test-eval: $(EVAL_STAMP)
	JAX_PLATFORMS=cpu $(PY) -m pytest --durations=10 tests/train/evaluation $(ARGS)

test-versions: $(STAMP)
	tests/versions.sh $(ARGS)

test-integrations: $(STAMP)
	tests/integrations.sh $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY) coat_jax

# The variable silences an advertisement for MkDocs 2.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# The wheel is imported in an environment that has nothing else in it.
package: $(STAMP)
	@$(PIP) build twine
	rm -rf dist build/package
	$(PY) -m build --outdir dist .
	$(PY) -m twine check --strict dist/*
	$(PY) -m venv build/package
	build/package/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt dist/*.whl
	cd build && package/bin/python -c 'import coat_jax; print(coat_jax.__version__)'

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last and removed first, so a .venv without a stamp is
# unfinished (pip was killed, say) and is made again. Candidates for Python are
# run, not just looked up: a pyenv shim can exist and still fail.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if [ ! -e $(STAMP) ]; then \
	  found=; \
	  for python in "$$PYTHON" python3.12 python3.13 python3 \
	      "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do \
	    if [ -n "$$python" ] && "$$python" -c 'import sys, venv, ensurepip; \
	assert sys.version_info >= (3, 12)' >/dev/null 2>&1; then \
	      found=$$python; break; \
	    fi; \
	    if [ -n "$$PYTHON" ] && [ "$$python" = "$$PYTHON" ]; then \
	      echo "PYTHON=$$PYTHON is not a Python >= 3.12 with venv and pip;" \
	        "looking for another." >&2; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'No Python >= 3.12 with the venv and ensurepip modules found.' \
	      'Install one (Debian or Ubuntu: apt install python3.12-venv;' \
	      'macOS: brew install python@3.12; anywhere: pyenv install 3.12)' \
	      'or name it: make PYTHON=/path/to/python3.12 ...' >&2; \
	    exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$found (a few minutes, once)"; \
	  "$$found" -m venv --clear $(VENV); \
	fi; \
	rm -f $(STAMP); \
	$(PIP) --editable '.[$(EXTRAS)]'; \
	touch $(STAMP)

$(COMPILER_STAMP): $(STAMP)
	rm -rf $(COMPILER)
	$(PIP) --no-deps --target $(COMPILER) jax-cuda13-plugin jax-cuda13-pjrt
	touch $@

$(TPU_STAMP): $(STAMP)
	rm -rf $(TPU_COMPILER)
	$(PIP) --no-deps --target $(TPU_COMPILER) libtpu
	touch $@

$(EVAL_STAMP): $(STAMP)
	@echo "Adding lm-evaluation-harness to $(VENV) (half a gigabyte, once)"
	@$(PIP) --editable '.[$(EXTRAS),eval]'
	@touch $@

$(CUDA_STAMP): $(STAMP)
	@echo "Adding CUDA to $(VENV) (some gigabytes, once)"
	@$(PIP) --editable '.[$(EXTRAS),cuda]'
	@touch $@
