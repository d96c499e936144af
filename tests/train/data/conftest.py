# SPDX-License-Identifier: Apache-2.0
"""The embedded text, read once for all tests."""

import pytest

from train.data.tokens import DataConfig, load_tokens


@pytest.fixture(scope="session")
def embedded():
  return load_tokens(DataConfig(), 256)
