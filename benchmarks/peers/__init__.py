# SPDX-License-Identifier: Apache-2.0
"""Other libraries, measured as this project measures itself."""
