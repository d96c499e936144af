# SPDX-License-Identifier: Apache-2.0
"""Tests codecs by name: options, variants, and users' own codecs."""

import sys
import types

import pytest

from benchmarks import memory
from benchmarks import optimizer as optimizer_benchmark
from coat_jax import codecs
from coat_jax.codecs import registry
from studies import accuracy
from tests.codecs import own_codec

OURS = ("coat", "coat_e8m0", "log8", "fp8", "int8", "bfloat16", "float32")
OWN = "tests.codecs.own_codec:make"


@pytest.fixture
def registered(monkeypatch):
  """Registers the codec of `own_codec` under the name "make"."""
  monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
  codecs.register(own_codec.make)


def test_names_are_those_of_the_constructors():
  assert codecs.names() == OURS
  for name in OURS:
    assert codecs.build(name) == getattr(codecs, name)()
    assert codecs.build(name).name == name


def test_options_are_the_arguments_of_the_constructor():
  groups = {"group_size": 128, "rounding": "stochastic"}
  assert codecs.options("coat") == groups | {"second": "e4m3"}
  for name in ("coat_e8m0", "log8", "fp8", "int8", OWN):
    assert codecs.options(name) == groups
  assert codecs.options("bfloat16") == codecs.options("float32") == {}


def test_build_passes_options_on():
  want = codecs.coat(64, rounding="nearest", second="e5m2")
  options = dict(group_size=64, rounding="nearest", second="e5m2")
  assert codecs.build("coat", **options) == want
  assert codecs.build(OWN, group_size=64) == own_codec.make(64)


def test_variants_combine_all_choices_that_are_accepted():
  found = codecs.variants("coat")
  assert found[0] == {"rounding": "stochastic", "second": "e4m3"}
  assert len(found) == 6
  assert codecs.variants("log8") == [{"rounding": "stochastic"}]
  assert codecs.variants("float32") == [{}]
  assert len(codecs.variants(OWN)) == 2


def refused_module():
  module = types.ModuleType("refused_codecs")
  module.needs = lambda group_size: codecs.coat(group_size)
  module.returns = lambda: "coat"
  return module


@pytest.mark.parametrize(
  "name, options, error, message",
  [
    ("coot", {}, ValueError, "one of coat, .*got 'coot'; did you mean 'coat'"),
    (
      "x",
      {},
      ValueError,
      "package.module:function, got 'x'; pass one",
    ),
    (
      "log8",
      {"second": "e5m2"},
      ValueError,
      "accepts group_size, rounding, got",
    ),
    ("float32", {"group_size": 8}, ValueError, "accepts no options, got"),
    ("log8", {"rounding": "nearest"}, ValueError, "freezes second moments"),
    (
      "no.such:make",
      {},
      ValueError,
      "ModuleNotFoundError: No module named",
    ),
    ("tests.codecs.own_codec:no", {}, ValueError, "AttributeError: .*'no'"),
    (
      "refused_codecs:needs",
      {},
      ValueError,
      r"got none for \['group_size'",
    ),
    ("refused_codecs:returns", {}, TypeError, "a MomentCodec, got 'coat'"),
  ],
)
def test_build_refuses_wrong_names_and_options(
  name, options, error, message, monkeypatch
):
  monkeypatch.setitem(sys.modules, "refused_codecs", refused_module())
  with pytest.raises(error, match=message):
    codecs.build(name, **options)


def test_register_refuses_a_second_codec_of_the_same_name(registered):
  # Registering the same codec again is allowed.
  codecs.register(own_codec.make)
  with pytest.raises(ValueError, match="must be unique, got 'coat' twice"):

    @codecs.register
    def coat():
      return codecs.fp8()


def optimizer_labels(names=None):
  return [label for label, _ in optimizer_benchmark.cases(names)]


def accuracy_labels(names=None):
  return [case.codec.name for case in accuracy.cases(names)]


def test_benchmarks_list_every_registered_codec():
  assert set(optimizer_labels()) == {*OURS, "coat_e5m2", "coat_factored"}
  assert set(accuracy_labels()) == {*OURS}
  assert set(memory.CODECS) == {*OURS}
