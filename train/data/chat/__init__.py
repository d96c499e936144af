# SPDX-License-Identifier: Apache-2.0
"""Conversations to train on: from files of rows to batches of tokens.

In the order in which data pass through:
  * `rows`: JSON files to rows, each with its file and line;
  * `formats`: a row to a conversation, whichever way it was written;
  * `template`, `published`: a conversation to text, as the model reads it,
    through `rendering` and `sandbox`: in a process that can be ended;
  * `targets`: which characters of that text the assistant wrote;
  * `images`: which images it has, and the tokens that stand for them;
  * `encoder`: text and characters to token ids and a mask of targets;
  * `documents`: all of the above, for whole files, and cut to a length;
  * `packing`: documents to rows of `seq + 1` tokens;
  * `batches`: rows to batches, in an order drawn from the seed.
"""
