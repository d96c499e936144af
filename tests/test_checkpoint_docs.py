# SPDX-License-Identifier: Apache-2.0
"""The code of docs/checkpoints.md: from eight devices to two."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import AxisType, NamedSharding

from coat_jax import coat_adamw
from coat_jax.sharding import state_shardings
from tests.comparing import assert_same_bits


def test_the_code_of_the_docs_runs(tmp_path):
  optimizer = coat_adamw(1e-2)

  def make_state(params):
    return {"params": params, "optimizer": optimizer.init(params)}

  def on(count):
    mesh = jax.make_mesh(
      (count,),
      ("fsdp",),
      axis_types=(AxisType.Auto,),
      devices=jax.devices()[:count],
    )
    return {"w": NamedSharding(mesh, P("fsdp"))}

  params = jax.device_put({"w": jnp.ones((64, 128))}, on(8))
  where = state_shardings(make_state, params)
  state = jax.jit(make_state, out_shardings=where)(params)
  given = dict(
    make_state=make_state,
    shapes={"w": jax.ShapeDtypeStruct((64, 128), jnp.float32)},
    where=on(2),
    state=state,
    path=tmp_path / "state",
  )
  text = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text()
  (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  exec(block, given)
  assert_same_bits(given["restored"], state)
  codes = given["restored"]["optimizer"][0].mu_codes["w"]
  assert codes.dtype == jnp.float8_e4m3fn
  assert len(codes.sharding.device_set) == 2
