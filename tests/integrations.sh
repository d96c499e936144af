#!/bin/sh
# Trains with coat_jax in other frameworks, each in an environment of its own
# under .venv/integrations: `make test-integrations`. Arguments name the
# frameworks; without any, all are tested.
set -e
PYTHON=${PYTHON:-.venv/bin/python}

install() { # environment, packages
  env=$1
  shift
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

tunix() {
  install "$1" google-tunix==0.1.7
}

for name in ${@:-tunix}; do
  env=.venv/integrations/$name
  if [ ! -e "$env/.installed" ]; then
    "$PYTHON" -m venv --clear "$env"
    $name "$env"
    # The framework has chosen its versions; the rest is for the tests.
    install "$env" --editable . beartype hypothesis pytest
    touch "$env/.installed"
  fi
  "$env/bin/python" -m pip list 2>&1 |
    grep -E '^(google-tunix|jax|flax|optax|orbax-checkpoint|qwix) '
  JAX_PLATFORMS=cpu "$env/bin/python" -m pytest -q -W default \
    -p no:cacheprovider "tests/integrations/test_$name.py"
done
