# SPDX-License-Identifier: Apache-2.0
"""Conversations to train on: from files to rows of tokens.

Data pass through these modules in this order:
  * `formats` reads JSON files as conversations;
  * `template` turns a conversation into text, in a process that can be killed
    (`rendering`, `sandbox`);
  * `targets` finds the characters that the assistant wrote;
  * `images` finds a conversation's images and adds the tokens for them;
  * `encoder` turns text into token ids and a mask of targets;
  * `documents` does all of this for whole files, and cuts long documents;
  * `packing` packs documents into rows for `train.data.batches`.
"""
