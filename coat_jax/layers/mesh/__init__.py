# SPDX-License-Identifier: Apache-2.0
"""Blocks on a mesh of devices: rules, specs and collectives."""
