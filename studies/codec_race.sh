#!/bin/sh
# Compares codecs of moments by training llama_60m for 1,500 steps, on one GPU.
#
#   studies/codec_race.sh DATA OUT SEED [CANDIDATE...]
#
# DATA is a folder that `python -m studies.docstrings` wrote. SEED sets the
# initial weights, the order of the data and the rounding; the race has seeds 0,
# 1 and 2. Without a CANDIDATE, all candidates of `studies.codec_race` run. To
# use several GPUs, start one process for each, with CUDA_VISIBLE_DEVICES.
# OUT/SEED.jsonl contains the rows. If the script is interrupted, call it again
# to continue. At the end, it times an optimizer step on 2^28 parameters. To see
# the result:
#
#   cat OUT/*.jsonl >> docs/rows/codec_race.jsonl
#   python -m studies.codec_race table --preset llama_60m
set -eu
if [ $# -lt 3 ]; then
  echo "usage: studies/codec_race.sh DATA OUT SEED [CANDIDATE...]" >&2
  exit 2
fi
data=$1 out=$2 seed=$3
shift 3
[ $# -gt 0 ] && set -- --candidates "$@"
mkdir -p "$out"

python -m studies.codec_race losses --preset llama_60m \
  --steps "${STEPS:-1500}" --batch 32 --seeds "$seed" \
  --data "$data/tokens.bin" --data-dtype uint16 --rows "$out/$seed.jsonl" "$@"

race=studies.race_codecs
python -m benchmarks.optimizer --codecs coat log8 int8 \
  $race:companded $race:log4 $race:e2m1 >"$out/step_time.$seed.jsonl"
