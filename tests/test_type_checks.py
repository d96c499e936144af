# SPDX-License-Identifier: Apache-2.0
"""Tests the types that are checked at run time during tests."""

import inspect
import typing
from collections.abc import Callable

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jaxtyping import Float

from coat_jax.numerics import formats
from tests import type_checks

decorate = type_checks.jaxtyped(typechecker=beartype.beartype)
Vector = Float[jax.Array, " n"]
type Pair = tuple[Vector, int]


def test_functions_of_the_package_are_checked():
  assert jaxtyping.jaxtyped is type_checks.jaxtyped
  with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'x'"):
    formats.saturating_cast(4, jnp.bfloat16)
  with pytest.raises(jaxtyping.TypeCheckError, match="dtype"):
    formats.array_bytes((2, 3), 4.0)


def test_arguments_and_results_are_checked_unless_checks_are_off(monkeypatch):
  @decorate
  def f(x: int, *, y: str = "") -> int:
    return y or x

  assert f(1) == 1
  for wrong in (lambda: f(1.0), lambda: f(1, y=2), lambda: f(1, y="a")):
    with pytest.raises(jaxtyping.TypeCheckError):
      wrong()
  assert list(inspect.signature(f).parameters) == ["x", "y"]
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
  assert f(1.0, y="a") == "a"


def test_axes_with_one_name_have_one_size():
  @decorate
  def f(x: Vector, y: Vector):
    return x + y

  @decorate
  def g(x: Pair, y: Vector):
    return x[0] + y

  ones = jnp.ones(2)
  f(ones, ones), g((ones, 1), ones)
  for wrong in (lambda: f(ones, ones[:1]), lambda: g((ones, 1), ones[:1])):
    with pytest.raises(jaxtyping.TypeCheckError):
      wrong()


@pytest.mark.parametrize(
  "hint, wanted",
  [
    (int, False),
    (jax.Array | None, False),
    (Callable[[int], jax.Array], False),
    (typing.Any, False),
    ("Float", True),
    (list["Float"], True),
    (typing.Iterable["Float"], True),
    (Vector | None, True),
    (dict[str, list[Vector]], True),
    (Callable[[Vector], int], True),
    (Pair, True),
    (typing.TypeVar("T", bound=Pair), True),
    (typing.TypeVar("T"), False),
  ],
  ids=str,
)
def test_annotations_with_axes_are_found(hint, wanted):
  assert type_checks._has_axes(hint) == wanted


def test_function_without_annotations_is_left_alone():
  def f(x):
    return x

  assert decorate(f) is f
