# SPDX-License-Identifier: Apache-2.0
"""Parts of `train.evaluate`; each part can be used alone."""
