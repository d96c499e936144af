# SPDX-License-Identifier: Apache-2.0
"""Training on a mesh with FP8 moments, and a checkpoint that changes meshes.

  python -m examples.sharded_training

A small network learns a function on all devices (on a CPU, eight are made up).
The batch is split over all of them, parameters over the axis `fsdp`; the
optimizer's state is sharded by `coat_jax.sharding` from the start. Halfway the
state is saved, restored on a mesh of another shape with the same bytes, and
training continues.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

from coat_jax import coat_adamw
from coat_jax.sharding import abstract_state, state_shardings

WIDTH, HIDDEN, LAYERS, BATCH, STEPS = 32, 1024, 2, 64, 40

SHAPES = {
  "up": (LAYERS, WIDTH, HIDDEN),
  "down": (LAYERS, HIDDEN, WIDTH),
  "bias": (LAYERS, HIDDEN),
}
# One matrix is split along its last axis, along which groups run, the other
# along its rows. Shares of multiples of 128 columns hold whole groups.
SPECS = {"up": P(None, None, "fsdp"), "down": P(None, "fsdp"), "bias": P()}

OPTIMIZER = optax.chain(
  optax.clip_by_global_norm(1.0), coat_adamw(3e-3, weight_decay=0.01)
)


def make_mesh(data: int) -> Mesh:
  """All devices, as `data` copies of the parameters."""
  count = jax.device_count()
  if count % data:
    raise ValueError(
      f"sharded_training: devices must come in fours, got {count}; set "
      "JAX_PLATFORMS=cpu, where eight are made up"
    )
  shape = (data, count // data)
  # The compiler moves parameters to where batches are: automatic axes.
  return jax.make_mesh(
    shape, ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto)
  )


def make_params(key: jax.Array) -> dict[str, jax.Array]:
  return {
    name: jax.random.normal(jax.random.fold_in(key, i), shape) * 0.05
    for i, (name, shape) in enumerate(SHAPES.items())
  }


def loss_of(params, x, y):
  for up, bias, down in zip(
    params["up"], params["bias"], params["down"], strict=True
  ):
    x = x + jax.nn.gelu(x @ up + bias[None]) @ down
  return jnp.mean((x - y) ** 2)


def make_state(params):
  """Everything that a step takes and returns, and a checkpoint holds."""
  return {"params": params, "optimizer": OPTIMIZER.init(params)}


def step(state, x, y):
  loss, grads = jax.value_and_grad(loss_of)(state["params"], x, y)
  updates, moments = OPTIMIZER.update(
    grads, state["optimizer"], state["params"]
  )
  params = optax.apply_updates(state["params"], updates)
  return {"params": params, "optimizer": moments}, loss


def train(state, mesh: Mesh, steps: range) -> tuple[dict, list[float]]:
  batch = NamedSharding(mesh, P(("data", "fsdp")))
  shardings = jax.tree.map(lambda x: x.sharding, state)
  # The state's memory is used again for the next one, sharded like it.
  jitted = jax.jit(
    step, out_shardings=(shardings, NamedSharding(mesh, P())), donate_argnums=0
  )
  losses = []
  for i in steps:
    x = jax.random.normal(jax.random.key(i), (BATCH, WIDTH))
    x, y = jax.device_put((x, jnp.flip(x, axis=-1)), batch)
    state, loss = jitted(state, x, y)
    losses.append(float(loss))
  return state, losses


def main(folder: str | pathlib.Path, steps: int = STEPS):
  """Trains on two meshes; returns both states at the change, and the losses."""
  mesh = make_mesh(data=2)
  where = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
  params = jax.jit(make_params, out_shardings=where)(jax.random.key(0))
  shardings = state_shardings(make_state, params)
  state = jax.jit(make_state, out_shardings=shardings)(params)
  state, losses = train(state, mesh, range(steps // 2))

  path = pathlib.Path(folder).absolute() / "state"
  other = make_mesh(data=4)
  where = {name: NamedSharding(other, spec) for name, spec in SPECS.items()}
  target = abstract_state(make_state, state["params"], where)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(path, target)

  # A step takes its state's memory: what is to be compared stays a copy.
  last = jax.tree.map(jnp.copy, restored)
  _, more = train(last, other, range(steps // 2, steps))
  for name, loss in (("first", losses[0]), ("last", more[-1])):
    print(f"{name} loss: {loss:.3f}")
  return state, restored, losses + more


if __name__ == "__main__":
  # Made up where there is no accelerator; without effect where there is.
  jax.config.update("jax_num_cpu_devices", 8)
  with tempfile.TemporaryDirectory() as temporary:
    main(temporary)
