# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Hugging Face checkpoints.

config    reads config.json into a `ModelConfig`, and writes it
tensors   maps a checkpoint's tensors to parameters: one table per family
pack      fuses separate weights, and splits them again
files     reads safetensors one tensor at a time
load      loads a checkpoint onto devices
save      saves a model as a checkpoint
"""
