# SPDX-License-Identifier: Apache-2.0
"""FP8 training for JAX that saves memory: optimizer states and activations."""
