#!/bin/sh
# Compares fine-tuning in FP8 with fine-tuning in BF16, on one GPU.
#
#   studies/finetuning.sh DATA OUT [SEED ...]
#
# DATA is a folder that `python -m studies.docstrings` wrote. First, a model of
# 1.1 B parameters is pretrained on Python code (49 M tokens, BF16). Then, for
# each SEED (by default 0 and 1), it is fine-tuned for 300 steps on
# conversations about Python: once in BF16 with f32 moments, and once with the
# coat recipe, from the same weights and on the same data. A batch has 8 x 2048
# tokens; this early in training, more steps help more than larger batches.
# OUT/*/metrics.jsonl contains the held-out loss (in nats per token that the
# assistant writes), peak memory and tokens/s. OUT/*/samples.jsonl contains the
# answers. Set STEPS and TUNING to change the numbers of steps, and SHAPE to
# change the model. If the script is interrupted, call it again to continue with
# the unfinished run.
set -eu
data=$1 out=$2
shift 2
[ $# -gt 0 ] || set -- 0 1
: "${SHAPE:=--model.num-layers 16 --model.d-model 2048 --model.d-ff 8192
  --model.num-heads 32 --model.num-kv-heads 8 --model.vocab-size 32000}"

run() { # MODULE FOLDER [OPTION ...]
  module=$1 folder=$2
  shift 2
  [ -e "$folder/finished" ] && return
  [ -e "$folder/config.json" ] && set -- "$@" --resume
  python -m "$module" "$@" --out "$folder" --keep 1 --save-every 100000
  touch "$folder/finished"
}

# SHAPE is several words.
# shellcheck disable=SC2086
run train.pretrain "$out/pretrained" llama_130m $SHAPE --recipe bf16 \
  --optim.codec float32 --data.path "$data/tokens.bin" --data.dtype uint16 \
  --steps "${STEPS:-3000}" --batch 8 --seq 2048 --optim.lr 1e-3 \
  --optim.warmup 0.1 --eval-every 500
if [ ! -e "$out/hf" ]; then
  python -m train.convert export-hf "$out/pretrained" --out "$out/hf" \
    --dtype bfloat16
  cp "$data/tokenizer.json" "$data/tokenizer_config.json" "$out/hf"
fi
for seed in "$@"; do
  for recipe in bf16 coat; do
    codec=coat
    [ $recipe = bf16 ] && codec=float32
    run train.finetune "$out/tuned_${recipe}_$seed" "$out/hf" \
      --data "$data/chats.jsonl" --template chatml --recipe $recipe \
      --optim.codec $codec --seed "$seed" --steps "${TUNING:-300}" --batch 8 \
      --eval-every 100
  done
done
