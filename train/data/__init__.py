# SPDX-License-Identifier: Apache-2.0
"""Reads data: from files of text, tokens, chats or images to batches."""
