# SPDX-License-Identifier: Apache-2.0
"""Kernels for a GPU: each gives what the definition of its name gives.

A module holds a family of operations. Each operation has the name and the
signature of its definition, and `interpret` beside, which runs the kernel on a
CPU. Its first statements raise `Unsupported` with a reason for arguments that
the kernel cannot take; `supported` ends them.
"""
