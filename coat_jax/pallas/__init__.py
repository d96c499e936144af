# SPDX-License-Identifier: Apache-2.0
"""GPU and TPU kernels for operations and optimizer steps.

A kernel computes the same result as its definition in plain JAX, and has the
same name and signature, plus the argument `interpret`, which runs the kernel on
a CPU. The `why_not` function above each kernel returns why the kernel does not
support its arguments, or None if it does.
"""
