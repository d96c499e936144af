# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton's own language, called by jax-triton.

For what Pallas' Triton backend has not: FP8 tensor cores. Their modules import
triton and jax-triton where they are called; `pip install "coat_jax[triton]"`
brings both. Nothing here runs on a CPU.
"""
