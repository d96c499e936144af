# SPDX-License-Identifier: Apache-2.0
"""Defines the names that calls in the tables can use.

These are the public names of coat_jax, small values, and helper functions.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import P
from jax.sharding import AbstractMesh, NamedSharding

import coat_jax
from coat_jax import codecs, layers, models, numerics, ops, optimizer, recipes
from coat_jax.optimizer import sharding
from tests.models.hf.folders import DATA

nan, inf = math.nan, math.inf
CODEC, COAT, BF16 = codecs.coat(), recipes.coat(), recipes.bf16()
LLAMA = DATA / "llama"


def f32(*shape):
  return jnp.ones(shape)


def ints(*shape):
  return jnp.ones(shape, jnp.int32)


def shapes(*shape, dtype="float32"):
  return jax.ShapeDtypeStruct(shape, dtype)


# Optimizers ----------------------------------------------------------------

PARAMS = {"w": shapes(2, 64)}
OTHERS = {"w": shapes(3, 64)}
STACK = {"layers": {"w": shapes(2, 4, 4)}, "embed": shapes(4)}
MESH = jax.make_mesh((1,), ("data",))
AXES = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"))
WHERE = {"w": NamedSharding(MESH, P())}
_PAIR = AbstractMesh((2,), ("data",))
ROWS = {"w": NamedSharding(_PAIR, P("data"))}
LONG = {"w": NamedSharding(MESH, P(None, None, "data"))}
COLUMNS = {"w": NamedSharding(_PAIR, P(None, "data"))}


def state(solver, params=PARAMS):
  """Returns the shapes of an optimizer's initial state."""
  return jax.eval_shape(solver.init, params)


def update(solver, grads=PARAMS, old=None, params=PARAMS):
  """Traces an update of an optax optimizer."""
  old = state(solver) if old is None else old
  return jax.eval_shape(solver.update, grads, old, params)


def apply(solver, grads=PARAMS, old=None, params=PARAMS, **options):
  """Traces a fused step."""
  old = state(solver) if old is None else old
  step = lambda *args: solver.apply(*args, **options)  # noqa: E731
  return jax.eval_shape(step, grads, old, params)


def applied(params, updates, **options):
  step = lambda *args: coat_jax.apply_updates(*args, **options)  # noqa: E731
  return jax.eval_shape(step, params, updates)


def backward(solver=None, **changed):
  """Traces a two-layer model whose optimizer steps in the backward pass."""
  solver = optimizer.fused_coat_adamw(1e-3) if solver is None else solver
  forward = dict(
    before=lambda outer: outer["embed"],
    layer=lambda params, x: jnp.tanh(params["w"] @ x),
    after=lambda outer, x: jnp.sum(x),
  )

  def step(params):
    old = solver.init(params) if hasattr(solver, "init") else ()
    return optimizer.step_in_backward(
      solver, params, old, **(forward | changed)
    ).params

  return jax.eval_shape(step, STACK)


def both(tree):
  """Initializes an optimizer that encodes every leaf."""
  return coat_jax.coat_adamw(1e-3, quantize_mask=lambda *_: True).init(tree)


# Layers --------------------------------------------------------------------

HEADS = layers.Heads(2, 1, 1e4)
BLOCK = dict(kind="rms", eps=1e-6, recipe=COAT)
PLAIN = BLOCK | dict(recipe=BF16)


def front(w, gamma=None):
  return layers.LinearWeights(f32(*w), gamma=gamma)


def weights(shape, back=(8, 4)):
  return layers.BlockWeights(
    front(shape),
    layers.LinearWeights(f32(*back)),
  )


def mixture(x=(2, 4), router=(4, 3), **changed):
  weights = layers.MoEWeights(
    None, None, f32(*router), f32(3, 4, 2, 8), f32(3, 8, 4)
  )
  known = dict(experts_per_token=2, normalize=False, kind=None, eps=1e-6)
  known |= dict(weights=weights, recipe=COAT) | changed
  return layers.moe(f32(*x), **known)


def attend(q=(1, 4, 2, 8), k=(1, 4, 2, 8), **options):
  return layers.dot_product_attention(f32(*q), f32(*k), f32(*k), **options)


def gated(x, w, activation="silu", **options):
  return layers.block(x, w, middle=layers.Elementwise(activation), **options)


def self_attend(positions=4, front=(8, 16), **changed):
  known = BLOCK | dict(middle=layers.SelfAttention(HEADS)) | changed
  own, inputs = weights(front, (8, 8)), layers.AttentionInputs(ints(positions))
  return layers.block(f32(1, 4, 8), own, inputs, **known)


def product(x, w, **options):
  """Multiplies two quantized operands."""
  w = ops.quantize_tensor(f32(*w), layout="columns")
  return ops.linear_fwd(ops.quantize_tensor(f32(*x)), w, **options)


# Models --------------------------------------------------------------------


def config(**changed):
  fields = dict(family="llama", num_layers=1, d_model=8, d_ff=16, num_heads=2)
  fields |= dict(num_kv_heads=2, vocab_size=16)
  return models.ModelConfig(**(fields | changed))


def vision(**changed):
  fields = dict(family="siglip_vision", num_layers=1, d_model=8, d_ff=16)
  fields |= dict(num_heads=2, image_size=4, patch_size=2)
  return models.VisionConfig(**(fields | changed))


def pair(**changed):
  fields = dict(text=config(), vision=vision(), image_token=15)
  return models.VisionLanguageConfig(**(fields | changed))


def rngs():
  return nnx.Rngs(0)


def _made(make):
  """Makes a model without weights, because arguments are checked first."""
  return nnx.eval_shape(make)


DECODER = _made(lambda: models.Decoder(config(), BF16, rngs=rngs()))
TOWER = _made(lambda: models.VisionTower(vision(), recipe=BF16, rngs=rngs()))
LLAVA = _made(lambda: models.VisionLanguageModel(pair(), BF16, rngs=rngs()))


def generate(prompts=((1,),), max_new_tokens=2, model=DECODER, **options):
  return models.generate(
    model, prompts, max_new_tokens=max_new_tokens, **options
  )


SCOPE = (
  {
    name: getattr(module, name)
    for module in (coat_jax, optimizer, numerics, recipes)
    for name in dir(module)
  }
  | {name: getattr(layers, name) for name in dir(layers)}
  | {name: getattr(models, name) for name in dir(models)}
  | {name: getattr(sharding, name) for name in dir(sharding)}
  | globals()
  | dict(np=np, optax=optax, nnx=nnx)
)
