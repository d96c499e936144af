# SPDX-License-Identifier: Apache-2.0
"""Vision towers: image encoders that are built of the decoders' blocks."""
