#!/bin/sh
# Tests each side of the package on the versions that it supports, each in an
# environment of its own under .venv/versions: `make test-versions`. Arguments are
# passed to pytest. All versions run, whether or not an earlier one fails.
PYTHON=${PYTHON:-.venv/bin/python}

OPTIMIZER="tests/numerics tests/codecs tests/optimizer"
LAYERS="$OPTIMIZER tests/ops tests/layers tests/models"

check() { # name, packages to pin, folders; then arguments of pytest
  name=$1 env=.venv/versions/$1 packages=$2 folders=$3
  shift 3
  # The constraints pin one version of everything; here pip resolves. It runs each
  # time, because the newest versions change.
  { [ -e "$env/bin/python" ] || "$PYTHON" -m venv "$env"; } &&
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check \
      --editable '.[train,vision,test]' $packages &&
    "$env/bin/python" -c 'import jax, optax, flax
print("jax", jax.__version__, "optax", optax.__version__, "flax", flax.__version__)' &&
    JAX_PLATFORMS=cpu "$env/bin/python" -m pytest -q -n 2 --dist worksteal \
      -m 'not slow and not aot and not tpu and not gpu' -p no:cacheprovider \
      $folders "$@" || failed="$failed $name${JAX_REMAT3:+-remat3}"
}

failed=
# Sharing temporary memory between leaves on a CPU needs JAX 0.11.
check oldest 'jax==0.10.0 jaxlib==0.10.0 optax==0.2.6 flax==0.12.8' \
  "$OPTIMIZER" --deselect \
  tests/optimizer/test_one_body.py::test_temporary_memory_is_about_that_of_one_leaf "$@"
# On a CPU, XLA of 0.11.0 gives each layer's temporary arrays their own memory, also
# in BF16.
check middle 'jax==0.11.0 jaxlib==0.11.0' "$LAYERS" --deselect \
  tests/layers/test_unrolled.py::test_xla_saves_less_than_a_quarter_of_the_bytes_with_coat "$@"
check newest '--upgrade jax jaxlib optax flax' "$LAYERS tests/pallas" "$@"
# With the new jax.checkpoint, which is off by default.
export JAX_REMAT3=1 JAX_CUSTOM_VJP3=1
check newest '--upgrade jax jaxlib optax flax' \
  "tests/layers/test_remat.py tests/models/test_remat.py" "$@"
if [ -n "$failed" ]; then
  echo "failed:$failed" >&2
  exit 1
fi
