#!/usr/bin/env bash
# Fine-tunes SmolLM2-135M-Instruct with recipes/qwen3-8b-invoice on receipts that the project makes up, and scores it
# before and after on receipts it has not seen. No account is needed. It runs on a GPU, or else on two CPU processes.
#
#   bash scripts/demo.sh          # exits non-zero unless the field F1 rose, and to 0.40 or more
#   bash scripts/demo.sh --tiny   # a random model and a few rows: only shows that everything runs
#
# What it makes lies in demo/ and .venv/. Every command is printed before it runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -eq 0 ] || [ "$*" = "--tiny" ] || { echo "usage: bash scripts/demo.sh [--tiny]" >&2 && exit 2; }

source scripts/environment.sh
make_environment
SECONDS=0
run() {
    printf '\n$ %s\n' "${*@Q}" | sed "s/'\([A-Za-z0-9_.,:=/-]*\)'/\1/g"
    "$@"
}

folder=demo/smollm2 rows=(--train 128 --test 16) gate=(--at_least 0.40) tokens=80
training=(--num_train_epochs 1 --learning_rate 3e-4 --warmup_steps 2 --max_length 256)
if [ $# -eq 1 ]; then
    folder=demo/tiny rows=(--train 8 --test 2) gate=() tokens=8
    training=(--max_steps 2 --max_length 1024)
fi
recipe=recipes/qwen3-8b-invoice
data=(--schema_file "$recipe/schema_sample.json" --text_column text --target_column entities)
mkdir -p "$folder"
rm -rf "$folder"/{data,run,before.json,after.json}
export HF_HOME="$PWD/demo/cache" TOKENIZERS_PARALLELISM=false

if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    launch=(accelerate launch --config_file accelerate_configs/single.yaml --main_process_port 0)
    batch=(--per_device_train_batch_size 8 --gradient_accumulation_steps 1)
else
    launch=(accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 --main_process_port 0)
    batch=(--use_cpu true --per_device_train_batch_size 1 --gradient_accumulation_steps 4)
    # bf16 is the faster arithmetic only on a CPU that has it.
    grep -qwE 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo || batch+=(--bf16 false)
    threads=$(($(nproc) / 2))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
    # Keep freed memory for the next tensor: giving it back to the system each time costs a tenth of the run.
    export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=17179869184
fi

if [ $# -eq 1 ]; then
    rm -rf "$folder/model"
    run python scripts/tiny_model.py qwen3 "$folder/model"
elif [ ! -f "$folder/model/source.json" ]; then
    rm -rf "$folder/model"
    run python scripts/smollm2.py "$folder/model"
fi
export HF_HUB_OFFLINE=1
run python scripts/sample_receipts.py "$folder/data" "${rows[@]}" --seed 0

score() { # MODEL REPORT
    run "${launch[@]}" "$recipe/score.py" "$1" "$folder/data/test.jsonl" "${data[@]}" \
        --chat_template_kwargs '{"enable_thinking": false}' --max_new_tokens "$tokens" --worst 3 --output "$2"
}
score "$folder/model" "$folder/before.json"
run "${launch[@]}" "$recipe/train.py" --model_name_or_path "$folder/model" --dataset_name "$folder/data/train.jsonl" \
    "${data[@]}" --output_dir "$folder/run" "${training[@]}" "${batch[@]}" \
    --eval_strategy no --save_strategy no --activation_checkpointing false
score "$folder/run/final" "$folder/after.json"
run python scripts/compare_scores.py "$folder/before.json" "$folder/after.json" --keep "$folder/run" "${gate[@]}"
run python scripts/report.py "$folder/run"

cat <<EOF

Done in $SECONDS s. Open $folder/run/report.html. The tuned model is $folder/run/final.
What to try next, after \`source .venv/bin/activate\`:
  tail -n 3 $folder/run/metrics.jsonl
  python scripts/sample_receipts.py more --train 0 --test 100 --seed 7
  python $recipe/score.py $folder/run/final more/test.jsonl ${data[*]}
  accelerate launch --config_file accelerate_configs/zero3.yaml $recipe/train.py      # Qwen3-8B, on GPUs
EOF
