# SPDX-License-Identifier: Apache-2.0
"""Vision towers: image encoders made of the same blocks as the decoders."""
