#!/usr/bin/env bash
# The tables of docs/results/your-network.md on a machine with a GPU, into a folder: benchmarks/modules/gpu.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-runs/gpu}
python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch can use no GPU here")'
mkdir -p "$out"
CUDA_VISIBLE_DEVICES=0 python -m pytest -q -n 8 tests > "$out/tests.txt" || tail -40 "$out/tests.txt"  # on the GPU
python -m benchmarks.speed steps --sizes resnet-18 transformer lstm --rounds 6 --device cuda --out "$out/steps.json"
python -m benchmarks.speed fits --sizes resnet-20 --device cuda --threads 1 --out "$out/fits.json"
for table in modules resnet20; do
    python -m bnn_pyro.run sweep "benchmarks/accuracy/$table.toml" --cores 1 --out "$out/$table"
done
data=(--data mnist --limit 10000 --module benchmarks.accuracy.nets:transformer --seed 0 --device cuda)
for precision in float32 bfloat16; do
    python -m bnn_pyro.run train my-network "${data[@]}" --set "precision=$precision" --out "$out/$precision" || [ $? -eq 4 ]
done
python -m bnn_pyro.run compare "$out/float32" "$out/bfloat16" --module benchmarks.accuracy.nets:transformer --out "$out/precision.html"
