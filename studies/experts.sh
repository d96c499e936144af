#!/bin/sh
# Trains a mixture of 32 experts, 0.25 B parameters, on 62 M tokens on one GPU.
#
#   studies/experts.sh DATA OUT VARIANT [SEED]
#
# DATA is a folder that `python -m studies.docstrings` wrote. VARIANT is one of
# those below, and SEED (default 0) sets the initial weights and the order of
# the data. The losses are in OUT/VARIANT.SEED/metrics.jsonl.
set -eu
data=$1 out=$2 variant=$3 seed=${4:-0}
case $variant in
  bf16) options="--recipe bf16 --optim.codec float32" ;;
  coat) options="" ;;
  fp8) options="--experts fp8" ;;
  *)
    echo "studies/experts.sh: unknown variant $variant" >&2
    exit 2
    ;;
esac

# $options is several words.
# shellcheck disable=SC2086
exec python -m train.pretrain llama_60m --out "$out/$variant.$seed" \
  --seed "$seed" --data.path "$data/tokens.bin" --data.dtype uint16 \
  --model.family qwen3_moe --model.num-experts 32 --model.experts-per-token 4 \
  --model.d-ff 512 --model.normalize-experts --model.auxiliary-loss 0.01 \
  --steps "${STEPS:-1900}" --batch 32 --eval-every 475 --eval-batches 32 \
  --save-every 1000000 $options
