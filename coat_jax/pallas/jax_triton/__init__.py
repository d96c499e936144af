# SPDX-License-Identifier: Apache-2.0
"""Kernels written in Triton's own language and called through jax-triton.

They use FP8 tensor cores, which Pallas' Triton backend does not support. The
modules import triton and jax-triton only when a kernel is called;
`pip install "coat_jax[triton]"` installs both. Nothing here runs on a CPU.
"""
