# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Hugging Face's transformers, in and out.

config    config.json to a `ModelConfig` and back
tensors   which tensors make which parameter: a table a family
pack      fused weights from separate ones, and back
files     safetensors, read a tensor at a time
load      a checkpoint onto devices
save      a model to a checkpoint
"""
