#!/bin/sh
# Does training bear weights that are not f32? Runs for one GPU.
#
#   studies/stored_weights.sh TEXT TOKENIZER OUT
#
# First 49 M tokens from scratch, with a schedule that ends at 1e-5, for three
# seeds: f32, bf16 rounded stochastically, 24 bits, and bf16 rounded to nearest
# as the negative control. Then what is like fine-tuning: from the trained f32
# weights of a seed 1,000 steps more at a constant 1e-5, and at 2e-6. The
# held-out loss (2.1 M tokens) of the last step is in OUT/*/metrics.jsonl.
# Called again, it goes on with the run that was not finished.
set -eu
text=$1 tokenizer=$2 out=$3

train() { # a kind of weights, a folder, options
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
