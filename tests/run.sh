#!/usr/bin/env bash
# The tests, after the same set-up as launch.sh: tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

./launch.sh --setup-only --with test --with dev
export PATH="$PWD/.venv/bin:$PATH"

# Engines on the CPU need Intel OpenMP preloaded, and tests need little memory for the KV cache.
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
settings=$(python -m vllm_specx.setup.cpu)
while IFS= read -r setting; do
    [[ -z $setting ]] || export "${setting?}"
done <<<"$settings"
python -m vllm_specx.models.embedded

(($#)) || set -- -m "not slow"
exec python -m pytest "$@"
