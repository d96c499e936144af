# SPDX-License-Identifier: Apache-2.0
"""Reads files of text, tokens, chats or images, and builds batches of them."""
