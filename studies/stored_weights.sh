#!/bin/sh
# Compares training with f32, 24-bit and bf16 weights, on one GPU.
#
#   studies/stored_weights.sh TEXT TOKENIZER OUT
#
# The kinds of weights are f32, bf16 rounded stochastically, 24 bits, and bf16
# rounded to nearest as a negative control. First, a model with each kind is
# trained from scratch on 49 M tokens, with three seeds and a learning rate that
# decays to 1e-5. Then, similar to fine-tuning, each kind continues from the f32
# weights of the same seed for 1,000 steps, once at a constant rate of 1e-5 and
# once at 2e-6. OUT/*/metrics.jsonl contains the held-out loss (on 2.1 M tokens)
# after the last step. If the script is interrupted, call it again to continue
# with the unfinished run.
set -eu
text=$1 tokenizer=$2 out=$3

train() { # KIND FOLDER [OPTION ...]
  module=train.pretrain params=$1 run=$2
  shift 2
  if [ "$params" = nearest ]; then
    module=studies.nearest_weights params=bfloat16
  fi
  [ -e "$run/finished" ] && return
  [ -e "$run/config.json" ] && set -- "$@" --resume --convert-state
  python -m "$module" llama_60m --out "$run" --params "$params" "$@" \
    --data.path "$text" --data.tokenizer "$tokenizer" --batch 32 --seq 1024 \
    --eval-batches 64 --eval-every 500 --save-every 500 --keep 1
  touch "$run/finished"
}

for seed in 0 1 2; do
  for params in float32 bfloat16 bfloat16_low8 nearest; do
    train $params "$out/scratch_${params}_$seed" --seed $seed --steps 1500 \
      --optim.lr 1e-3 --optim.warmup 150 --optim.min-lr-ratio 0.01
    for rate in 1e-5 2e-6; do
      run="$out/tuned_${rate}_${params}_$seed"
      if [ ! -e "$run" ]; then
        cp -r "$out/scratch_float32_$seed" "$run"
        rm "$run/finished"
      fi
      train $params "$run" --seed $seed --steps 2500 \
        --optim.lr $rate --optim.warmup 0 --optim.min-lr-ratio 1
    done
  done
done
