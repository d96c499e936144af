# SPDX-License-Identifier: Apache-2.0
"""Kernels; each computes what the operation of the same name defines.

Each module holds a family of operations. A kernel has the name and signature of
its definition, plus `interpret`, which runs it on a CPU. The `why_not` function
before a kernel returns why the kernel cannot take its arguments, or None.
"""
