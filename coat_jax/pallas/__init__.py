# SPDX-License-Identifier: Apache-2.0
"""GPU kernels; each computes what the operation of the same name defines.

A module holds a family of operations. Each kernel has the name and signature
of its definition, plus `interpret`, which runs it on a CPU. A kernel first
checks its arguments and raises `Unsupported`, with a reason, for any that it
cannot take; the call of `supported` marks the end of these checks.
"""
