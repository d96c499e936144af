# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Hugging Face checkpoints.

config_tables  the keys of each family's config.json: one row per family
tensor_tables  the tensors of each family's parameters: one table per family
config         reads and writes config.json by its row
keys           reads and writes single keys
layer_keys     reads and writes the keys of windows and RoPE
tensors        lists a model's tensors by its table, and packs them
files          reads safetensors one tensor at a time
load, save     read and write a checkpoint: `load_hf` and `save_hf`
whole          writes a folder completely or not at all
"""
