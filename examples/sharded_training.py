# SPDX-License-Identifier: Apache-2.0
"""Trains on a mesh with FP8 moments and moves a checkpoint to another mesh.

  python -m examples.sharded_training

A small network learns a function on all devices (on a CPU, we simulate eight).
Batches are split over all devices. Parameters are split over the mesh axis
`fsdp`. `state_shardings` shards the optimizer's state from the start.

Halfway through, the state is saved. It is restored, bit for bit, on a mesh of a
different shape, where training continues.
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
from coat_jax.optimizer import abstract_state, state_shardings

WIDTH, HIDDEN, LAYERS, BATCH, STEPS = 32, 1024, 2, 64, 40

SHAPES = {
  "up": (LAYERS, WIDTH, HIDDEN),
  "down": (LAYERS, HIDDEN, WIDTH),
  "bias": (LAYERS, HIDDEN),
}
# `down` is split by rows. `up` is split along its last axis, along which the
# codec forms groups of 128 values. Each shard of `up` holds whole groups.
SPECS = {"up": P(None, None, "fsdp"), "down": P(None, "fsdp"), "bias": P()}

OPTIMIZER = optax.chain(
  optax.clip_by_global_norm(1.0), coat_adamw(3e-3, weight_decay=0.01)
)


def make_mesh(data: int) -> Mesh:
  """Builds a mesh of all devices, with `data` copies of the parameters."""
  count = jax.device_count()
  if count % data:
    raise ValueError(
      f"sharded_training: the number of devices must be divisible by {data}, "
      f"got {count}; set JAX_PLATFORMS=cpu, which simulates eight"
    )
  shape = (data, count // data)
  # With Auto axes, the compiler inserts the communication between devices.
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
  """Builds the state that steps update and checkpoints store."""
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
  # The next state reuses this state's memory and has the same shardings.
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
  """Trains on two meshes; returns the saved and restored states, and losses."""
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

  # A step reuses its state's memory, so we train on a copy and keep `restored`.
  last = jax.tree.map(jnp.copy, restored)
  _, more = train(last, other, range(steps // 2, steps))
  for name, loss in (("first", losses[0]), ("last", more[-1])):
    print(f"{name} loss: {loss:.3f}")
  return state, restored, losses + more


if __name__ == "__main__":
  # This simulates devices on a CPU; with an accelerator it has no effect.
  jax.config.update("jax_num_cpu_devices", 8)
  with tempfile.TemporaryDirectory() as temporary:
    main(temporary)
