# SPDX-License-Identifier: Apache-2.0
"""Tests how functions passed to `step_in_backward` may read parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.optimizer import leafwise, step_in_backward
from tests.optimizer.small_stack import LAYERS, after, initial, layer


@pytest.mark.parametrize("is_jitted", [True, False])
@pytest.mark.parametrize("name", ["before", "layer", "after"])
def test_functions_that_close_over_parameters_are_refused(name, is_jitted):
  optimizer = leafwise(optax.sgd(0.1))

  def step(params, state):
    gate, stacked = params["embedding"], params["layers"]["w"]
    functions = dict(
      before=lambda outer: outer["embedding"], layer=layer, after=after
    )
    # Checkpointed and jitted functions have separate jaxprs and constants.
    functions[name] = {
      "before": lambda outer: outer["embedding"] * jnp.sum(stacked),
      "layer": jax.checkpoint(lambda params, x: layer(params, x) + gate),
      "after": jax.jit(lambda outer, x: after(outer, x) * jnp.sum(gate)),
    }[name]
    return step_in_backward(optimizer, params, state, **functions)

  path = "layers/w" if name == "before" else "embedding"
  with pytest.raises(
    ValueError,
    match=f"step_in_backward: {name} must read .* closes over '{path}', which "
    f"would get no gradient; {'let' if name == 'layer' else 'read'}",
  ):
    params = initial()
    (jax.jit(step) if is_jitted else step)(params, optimizer.init(params))


def test_carry_of_layers_may_contain_a_shared_parameter():
  rate, gate = 0.1, jnp.float32(0.3)
  params = initial() | {"gate": gate}
  optimizer = leafwise(optax.sgd(rate))

  def gated(params, carry):
    x, gate = carry
    return x + gate * jnp.tanh(x * params["w"]), gate

  def whole(params):
    carry = params["embedding"], params["gate"]
    for i in range(LAYERS):
      carry = gated({"w": params["layers"]["w"][i]}, carry)
    return after(None, carry[0])

  got = jax.jit(
    lambda params, state: (
      step_in_backward(
        optimizer,
        params,
        state,
        before=lambda outer: (outer["embedding"], outer["gate"]),
        layer=gated,
        after=lambda outer, carry: after(outer, carry[0]),
      ).params
    )
  )(params, optimizer.init(params))
  want = jax.tree.map(
    lambda p, g: p - rate * g, params, jax.grad(whole)(params)
  )
  for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5)
