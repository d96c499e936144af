# SPDX-License-Identifier: Apache-2.0
"""Kernels for a GPU: each gives what the definition of its name gives.

A module holds a family of operations. Each operation has the name and the
signature of its definition in `reference`, and a function `<name>_unsupported`
of the same arguments that says why the kernel cannot take them, or None.
"""
