# SPDX-License-Identifier: Apache-2.0
"""Estimates the memory of training steps without compiling them.

`step` computes the peak of a whole step from `count` and `backward`. `search`
finds the fastest settings that fit. docs/plan.md describes what is counted.
"""
