#!/usr/bin/env bash
# The whole job on a real language model, on the CPU, in minutes:  bash tools/demo.sh
# SmolLM2-135M-Instruct answers prompts, its hidden states are cached, a drafter is trained from the
# cache, and real speculative decoding is measured. Everything is written to demo-out/.
source "$(dirname "$0")/install.sh"
export TOKENIZERS_PARALLELISM=true HF_HUB_OFFLINE=1
out=demo-out
mkdir -p "$out"
rm -rf "$out/cache" "$out/run" "$out/live.jsonl" "$out/live.jsonl.settings.json" "$out/seconds"

stage() {  # name, command...: run, and remember how long it took
    echo; echo "== $1"; shift
    echo "\$ $*"
    local start=$SECONDS
    "$@"
    echo "$name $((SECONDS - start))" >> "$out/seconds"
}

begin=$SECONDS
name=convert
[ -d "$out/target" ] || stage "convert SmolLM2 from GGUF to safetensors (once)" \
    python tools/make_demo_target.py "$out/target"
name=regenerate
stage "let the target answer a few prompts itself (the rest is shipped in tools/demo_data)" \
    hscache regenerate --target "$out/target" --prompts tools/demo_data/prompts.jsonl \
    --output "$out/live.jsonl" --batch-size 8 --max-new-tokens 48 --temperature 0
name=produce
stage "run the target once over the corpus, cache its hidden states" \
    hscache produce --config configs/demo-produce.yaml --shard-dir "$out/cache"
name=fit
stage "train a drafter from the cache: a separate process, no target" \
    trainer fit --config configs/demo-fit.yaml --shards "$out/cache"
name=eval
stage "measure it: held-out shards, and real speculative decoding" \
    trainer eval --checkpoint "$out/run" --shards "$out/cache" \
    --prompts tools/demo_data/held_out.jsonl.gz --max-prompts 6 --max-new-tokens 64 \
    --json "$out/eval.json"
name=inspect
stage "look into the cache" hscache inspect "$out/cache"

echo; echo "== summary"
python tools/demo_summary.py "$out" $((SECONDS - begin))
