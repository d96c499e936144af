# SPDX-License-Identifier: Apache-2.0
"""Conversations to train on: from files to rows of tokens.

In the order in which data pass through:
  * `formats`: JSON files to rows, and rows to conversations;
  * `template`: a conversation to text, rendered in a process that can be
    ended (`rendering`, `sandbox`);
  * `targets`: which characters of that text the assistant wrote;
  * `images`: which images it has, and the tokens that stand for them;
  * `encoder`: text and characters to token ids and a mask of targets;
  * `documents`: all of the above, for whole files, and cut to a length;
  * `packing`: documents to rows of `seq + 1` tokens, which `train.data.batches`
    makes batches of.
"""
