# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Hugging Face checkpoints.

config_tables  the keys of each family's config.json: one row per family
tensor_tables  the tensors of each family's parameters: one table per family
config         reads and writes config.json, as `config_tables` describes
keys           reads and writes single keys of config.json
layer_keys     reads and writes the keys for windows and RoPE
tensors        converts parameters to tensors and back, using `tensor_tables`
files          reads safetensors one tensor at a time
load, save     read and write a checkpoint: `load_hf` and `save_hf`
whole          writes a folder completely or not at all
"""
