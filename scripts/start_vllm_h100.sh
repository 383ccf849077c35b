#!/usr/bin/env bash
usage() {
  cat <<'END'
Start vLLM's OpenAI server for one H100, as the gateway expects it.

  scripts/start_vllm_h100.sh [OPTION ...]

Variables:
  VLLM_MODEL          what to serve: a name or a folder (openai/gpt-oss-20b). Clients may name it in
                      full or by its last part (gpt-oss-20b)
  VLLM_PORT           where to listen (8001, the gateway's default backend)
  VLLM_ENFORCE_EAGER  1: no CUDA graphs; for debugging, answers come slower
  VLLM_TRUST_REMOTE_CODE
                      1 (default): Python code that the model's repository brings is run on this
                      machine (--trust-remote-code); 0: it is not, and models that need it do not load

Options go to `proofserve serve` and from there to vLLM. The last of two equal options counts:
  scripts/start_vllm_h100.sh --host 127.0.0.1 --max-model-len 32768

The server listens on all addresses. With the proof endpoints it then needs a key:
  POC_API_KEY=$(openssl rand -hex 32) scripts/start_vllm_h100.sh --enable-poc
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
names=("$model")
short=$(basename -- "$model")
if [[ "$short" != "$model" ]]; then
  names+=("$short")
fi
options=(
  --served-model-name "${names[@]}"
  --port "${VLLM_PORT:-8001}"
  --gpu-memory-utilization 0.90
  --max-num-seqs 256
  --tensor-parallel-size 1
  --dtype bfloat16
)
if [[ "${VLLM_TRUST_REMOTE_CODE:-1}" == "1" ]]; then
  echo "$model may run its own Python code here; VLLM_TRUST_REMOTE_CODE=0 forbids it" >&2
  options+=(--trust-remote-code)
fi
if [[ "${VLLM_ENFORCE_EAGER:-0}" == "1" ]]; then
  options+=(--enforce-eager)
fi

# vLLM itself reads VLLM_PORT, as the first port for the traffic between its own processes. If it
# stayed set, these ports would collide with the server's port and with those of the next server. The
# other variables mean nothing to vLLM, which warns of unknown names.
unset VLLM_PORT VLLM_MODEL VLLM_ENFORCE_EAGER VLLM_TRUST_REMOTE_CODE

exec proofserve serve "$model" "${options[@]}" "$@"
