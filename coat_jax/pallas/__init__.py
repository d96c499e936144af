# SPDX-License-Identifier: Apache-2.0
"""GPU and TPU kernels for operations and optimizer steps.

A kernel computes the same result as its definition in plain JAX, up to
rounding. It has the definition's name and signature, and an additional argument
`interpret` that runs the kernel on a CPU. The `_why_not` function above each
kernel returns why the kernel does not support its arguments, or None.
"""
