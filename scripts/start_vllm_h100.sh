#!/usr/bin/env bash
usage() {
  cat <<'END'
Start vLLM's OpenAI server for one H100, as the gateway expects it.

  scripts/start_vllm_h100.sh [OPTION ...]

Variables:
  VLLM_MODEL          what to serve: a name or a folder (openai/gpt-oss-20b)
  VLLM_PORT           where to listen (8001, the gateway's default backend)
  VLLM_ENFORCE_EAGER  1: no CUDA graphs; for debugging, answers come slower

Options go to `proofserve serve` and from there to vLLM; the last of two equal ones counts:
  scripts/start_vllm_h100.sh --host 127.0.0.1 --max-model-len 32768
  POC_API_KEY=... scripts/start_vllm_h100.sh --enable-poc   # with the proof endpoints
END
}

set -euo pipefail

if [[ "${1:-}" == "--help" || "${1:-}" == "-h" ]]; then
  usage
  exit 0
fi
if ! command -v proofserve > /dev/null; then
  echo "proofserve is not on PATH: pip install -r requirements-vllm.txt, or activate its venv" >&2
  exit 127
fi

model=${VLLM_MODEL:-openai/gpt-oss-20b}
options=(
  --port "${VLLM_PORT:-8001}"
  --gpu-memory-utilization 0.90
  --max-num-seqs 256
  --tensor-parallel-size 1
  --dtype bfloat16
  --trust-remote-code
)
if [[ "${VLLM_ENFORCE_EAGER:-0}" == "1" ]]; then
  options+=(--enforce-eager)
fi

# vLLM reads VLLM_PORT itself, as the first of the ports between its own processes, counting up from
# there: left in place, they would compete with the server's port and with the next server's. The
# other two mean nothing to vLLM, and it warns of such names.
unset VLLM_PORT VLLM_MODEL VLLM_ENFORCE_EAGER

exec proofserve serve "$model" "${options[@]}" "$@"
