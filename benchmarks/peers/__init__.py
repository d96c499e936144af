# SPDX-License-Identifier: Apache-2.0
"""Other libraries, measured in the same way as this project."""
