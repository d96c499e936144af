#!/bin/sh
# Is fine-tuning in FP8 as good as in BF16? Runs for one GPU.
#
#   studies/finetuning.sh DATA OUT [SEED ...]
#
# DATA is what `python -m studies.docstrings` wrote. A model of 1.2 B
# parameters learns to write Python first (49 M tokens, BF16), then 300 steps of
# conversations about it, in BF16 with f32 moments and in recipe coat, from the
# same weights with the same data for each seed (0 and 1). A batch has 8 x 2048
# tokens: so early, more steps teach more than larger ones. The held-out loss,
# nats for each token that the assistant writes, peaks and tokens/s are in
# OUT/*/metrics.jsonl, answers in OUT/*/samples.jsonl. STEPS and TUNING are other
# numbers of steps, SHAPE other options of the model. Called again, it goes on
# with the run that was not finished.
set -eu
data=$1 out=$2
shift 2
[ $# -gt 0 ] || set -- 0 1
: "${SHAPE:=--model.num-layers 16 --model.d-model 2048 --model.d-ff 8192
  --model.num-heads 32 --model.num-kv-heads 8 --model.vocab-size 32000}"

run() { # a module, a folder, options
  module=$1 folder=$2
  shift 2
  [ -e "$folder/finished" ] && return
  [ -e "$folder/config.json" ] && set -- "$@" --resume
  python -m "$module" "$@" --out "$folder" --keep 1 --save-every 100000
  touch "$folder/finished"
}

# SHAPE is options.
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
