#!/bin/sh
# Trains llama_130m on 301 M tokens, on one GPU.
#
#   studies/long.sh DATA OUT VARIANT [SEED]
#
# DATA is a folder that `python -m studies.docstrings` wrote. With --suffixes
# .py .pyi .h .hpp .cuh .cu .cpp .inl .md .rst .txt, that command finds 188 M
# tokens on a machine with PyTorch and CUDA. A run reads some of them twice.
# VARIANT is one of those below, and SEED (default 0) sets the initial weights
# and the order of the data. To use several GPUs, start one process for each,
# with CUDA_VISIBLE_DEVICES. The losses are in OUT/VARIANT.SEED/metrics.jsonl.
# If the script is interrupted, call it again to continue.
set -eu
data=$1 out=$2 variant=$3 seed=${4:-0}
lean="--params bfloat16 --optimizer-in-backward --optim.clip share"
case $variant in
  bf16) options="--recipe bf16 --optim.codec float32" ;;
  moments) options="--recipe bf16" ;;
  coat) options="" ;;
  coat_attention) options="--attention fp8" ;;
  lean) options=$lean ;;
  lean_attention) options="$lean --attention fp8" ;;
  *)
    echo "studies/long.sh: unknown variant $variant" >&2
    exit 2
    ;;
esac
folder=$out/$variant.$seed
[ -e "$folder/config.json" ] && options="$options --resume"

# $options is several words.
# shellcheck disable=SC2086
exec python -m train.pretrain llama_130m --out "$folder" --seed "$seed" \
  --data.path "$data/tokens.bin" --data.dtype uint16 --steps "${STEPS:-9200}" \
  --batch 32 --eval-every 460 --eval-batches 32 --save-every 1000 --keep 1 \
  $options
