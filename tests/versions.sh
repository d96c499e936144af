#!/bin/sh
# Tests each side of the package on the versions that it supports, each in an
# environment of its own under .venv/versions: `make test-versions`. Arguments are
# passed to pytest.
set -e
PYTHON=${PYTHON:-.venv/bin/python}

OPTIMIZER="tests/numerics tests/codecs tests/optimizer"
LAYERS="$OPTIMIZER tests/ops tests/layers tests/models"

check() { # name, packages to pin, folders; then arguments of pytest
  env=.venv/versions/$1 packages=$2 folders=$3
  shift 3
  if [ ! -e "$env/.installed" ]; then
    "$PYTHON" -m venv --clear "$env"
    # The constraints pin one version of everything; here pip resolves.
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check \
      --editable '.[train,vision,test]' $packages
    touch "$env/.installed"
  fi
  "$env/bin/python" -c 'import jax, optax, flax
print("jax", jax.__version__, "optax", optax.__version__, "flax", flax.__version__)'
  JAX_PLATFORMS=cpu "$env/bin/python" -m pytest -q -n 2 --dist worksteal \
    -m 'not slow and not aot and not gpu' -p no:cacheprovider $folders "$@"
}

# GPU kernels, which one test interprets, need JAX 0.11.
check oldest 'jax==0.10.0 jaxlib==0.10.0' "$OPTIMIZER" --deselect \
  tests/codecs/test_own_codec.py::test_own_codec_may_add_its_kernel "$@"
check middle 'jax==0.11.0 jaxlib==0.11.0' "$LAYERS" "$@"
check newest '--upgrade jax jaxlib optax flax' "$LAYERS" "$@"
