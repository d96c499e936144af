# SPDX-License-Identifier: Apache-2.0
"""Plans the memory of training steps without compiling them.

  count.py     counts what a layer saves for its backward pass, by tracing it
  backward.py  computes what exists while one layer is differentiated
  step.py      computes the peak of a whole step from these two figures and the
               shapes of the training state
  search.py    finds the settings that fit and train fastest

docs/plan.md describes what is counted.
"""
