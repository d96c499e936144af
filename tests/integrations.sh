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

# MaxText's wheel requires nothing without an extra, and its extras bring CUDA or
# libtpu. The wheel contains the list of what it imports.
maxtext() {
  install "$1" maxtext==0.2.5
  site=$("$1/bin/python" -c \
    'import sysconfig; print(sysconfig.get_path("purelib"))')
  install "$1" \
    -r "$site/dependencies/requirements/base_requirements/requirements.txt"
  cat coat_jax/integrations/maxtext_*.patch | patch -p1 -d "$site"
}

# Levanter's releases are nightly, and under this name.
levanter() {
  install "$1" marin-levanter==0.2.227.dev40316220070
}

for name in ${@:-tunix maxtext levanter}; do
  env=.venv/integrations/$name
  if [ ! -e "$env/.installed" ]; then
    "$PYTHON" -m venv --clear "$env"
    $name "$env"
    # The framework has chosen its versions; the rest is for the tests.
    install "$env" --editable . beartype hypothesis pytest
    touch "$env/.installed"
  fi
  "$env/bin/python" -m pip list 2>&1 |
    grep -E '^(google-tunix|maxtext|marin-levanter|jax|flax|optax|orbax-checkpoint|qwix) '
  JAX_PLATFORMS=cpu "$env/bin/python" -m pytest -q -W default \
    -p no:cacheprovider "tests/integrations/test_$name.py"
done
