# SPDX-License-Identifier: Apache-2.0
"""Turns files of conversations into rows of tokens to train on.

* `formats` reads JSON files as conversations.
* `template` finds a chat template, and turns a conversation into text.
* `rendering` runs the template in Jinja's sandbox.
* `targets` finds the characters that the assistant wrote.
* `encoder` turns text into token ids and a mask of target tokens.
* `images` finds a conversation's images and adds the tokens for them.
* `documents` runs all of these for whole files, and cuts long documents.
* `packing` packs documents into rows for `train.data.batches`.
"""
