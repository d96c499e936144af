# SPDX-License-Identifier: Apache-2.0
"""Training scripts to read, run from the clone and copy."""
