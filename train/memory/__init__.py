# SPDX-License-Identifier: Apache-2.0
"""Counts and plans the memory of training steps, without compiling anything.

  count.py     what a layer saves for its backward pass, from traced gradients
  backward.py  what exists while one layer is differentiated, in closed form
  step.py      the peak of a whole step, from these two and the abstract state
  search.py    the settings that fit and train fastest

`python -m train.plan` prints plans, and `python -m benchmarks.memory plan`
compares them with the compiler. docs/plan.md describes what is counted.
"""
