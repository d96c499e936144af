# SPDX-License-Identifier: Apache-2.0
"""Reads text, tokens, chats or images from files, and builds batches."""
