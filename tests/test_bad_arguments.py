# SPDX-License-Identifier: Apache-2.0
"""Checks that public functions refuse bad arguments with a clear error.

The tables in `tests/bad_arguments` have two lines for each call. The first line
is the call. The second is the error's type and the beginning of its message, or
"accepted" and the reason. "..." in a message stands for any text. `scope`
defines the names that calls use.
"""

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxtyping
import pytest
from flax import nnx

from coat_jax import ops
from tests.bad_arguments.scope import SCOPE
from tests.docs.test_reference import PUBLIC, find, public_names

TABLES = Path(__file__).parent / "bad_arguments"
# Calls in these tables are only traced, because compiling accepted calls would
# be slow.
TRACED = ("layers", "ops")
# A message consists of the function's name, the rule, what was got, and a
# remedy. The tables leave out the remedy.
FORM = r"[\w.]+: .*\bgot\b.*[;:] .*"
# Maps functions of `scope` to the public functions that they call.
CALLED = {
  "applied": "apply_updates",
  "attend": "dot_product_attention",
  "backward": "step_in_backward",
  "config": "ModelConfig",
  "mixture": "moe",
  "pair": "VisionLanguageConfig",
  "self_attend": "SelfAttention",
  "vision": "VisionConfig",
}
# Public names that users do not call with arguments of their own.
_HELPER = "for codecs, whose encode has checked the arrays"
NOT_CALLED = {
  "QTensor": "what quantize returns; its fields are not checked",
  "Moment": "what a state stores; its fields are not checked",
  "exp2_biased": _HELPER,
  "exponent_bounds": _HELPER,
  "finite_amax": _HELPER,
  "nonzero_amin": _HELPER,
  "magnitude_of": _HELPER,
  "octaves_between": _HELPER,
  "share": _HELPER,
  "divided": _HELPER,
  "split_float": _HELPER,
  "names": "takes no arguments",
  "float32": "takes no arguments",
  "bfloat16": "takes no arguments",
  "Middle": "abstract: each kind of block has its own",
  "RopeScaling": "abstract: its kinds have rows",
  "ConversionReport": "what convert returns",
  "GroupCodec": "a protocol",
  "Grouped": "abstract: codecs.coat and the others have rows",
  "Plain": "codecs.float32 makes it",
  "RecipeModule": "abstract: its modules have rows",
}


class Row(NamedTuple):
  """A call in a table, and its expected outcome."""

  table: str
  call: str
  outcome: str


def rows_of(path: Path) -> list[Row]:
  text = path.read_text()
  lines = [x for x in text.splitlines() if x and not x.startswith("#")]
  assert all(x.startswith("  ") for x in lines[1::2])
  pairs = zip(lines[::2], lines[1::2], strict=True)
  return [Row(path.stem, call, outcome.strip()) for call, outcome in pairs]


ROWS = [row for path in sorted(TABLES.glob("*.txt")) for row in rows_of(path)]


def make(row: Row) -> None:
  def call():
    eval(row.call, SCOPE | {"R": nnx.Rngs(0)})

  if row.table in TRACED:
    jax.eval_shape(call)
  else:
    call()


def fault(row: Row) -> str | None:
  """Returns what is wrong with the outcome of a call, or None."""
  kind, _, message = row.outcome.partition(": ")
  try:
    make(row)
  except Exception as error:
    # JAX appends a note on how to see more of the traceback.
    said = str(error).partition("\n-----")[0]
    got = f"{type(error).__name__}: {said}"
    wanted = re.escape(message).replace(re.escape("..."), ".*")
    is_clear = re.fullmatch(FORM, said) is not None
    if type(error).__name__ == kind and is_clear and re.match(wanted, said):
      return None
  else:
    got = "accepted"
    if kind == "accepted" and message:
      return None
  return f"{row.table}: {row.call}\n  wanted {row.outcome}\n  got {got}"


@pytest.mark.parametrize("table", sorted({row.table for row in ROWS}))
def test_bad_arguments_are_refused_clearly(table, monkeypatch):
  # Turn off the tests' type checks, which users do not have.
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
  faults = filter(None, (fault(row) for row in ROWS if row.table == table))
  assert not (found := list(faults)), "\n".join(found)


def test_tables_contain_no_call_twice():
  calls = [row.call for row in ROWS]
  assert len(calls) == len(set(calls)) >= 222


def names_in(call: str) -> set[str]:
  """Returns the names, without modules, of all functions that are called."""
  found = set()
  for node in ast.walk(ast.parse(call, mode="eval")):
    if isinstance(node, ast.Call):
      found.add(ast.unparse(node.func).split(".")[-1])
  return found | {CALLED[name] for name in found if name in CALLED}


def is_called(value: Any) -> bool:
  """Returns whether `value` is a function or a class that checks arguments."""
  is_record = isinstance(value, type) and hasattr(value, "_fields")
  is_dtype = "dtype" in dir(value) and not isinstance(value, ops.Op)
  is_record |= hasattr(value, "__total__")  # A TypedDict of options.
  is_alias = not isinstance(value, type) and hasattr(value, "__args__")
  return callable(value) and not (is_record or is_dtype or is_alias)


def test_each_public_name_has_a_row():
  called = set().union(*(names_in(row.call) for row in ROWS))
  missing = []
  for path in PUBLIC:
    module = find(path)
    for name in public_names(module):
      if is_called(getattr(module, name)) and name not in called:
        missing.append(name)
  missing += [
    name
    for name in public_names(ops)
    if is_called(getattr(ops, name)) and name not in called
  ]
  assert {*missing} - NOT_CALLED.keys() == set()


def test_accepted_call_and_wrong_error_are_found():
  for call, outcome in (
    ("coat_adamw(1e-3)", "ValueError: coat_adamw: must"),
    ("coat_adamw(nan)", "accepted: no"),
    ("coat_adamw(1e-3)", "accepted: "),
    ("coat_adamw(nan)", "TypeError: coat_adamw: learning_rate"),
    ("coat_adamw(nan)", "ValueError: coat_adamw: b1"),
    ("int('x')", "ValueError: "),
  ):
    assert fault(Row("optimizers", call, outcome))
