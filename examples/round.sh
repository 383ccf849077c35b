#!/bin/sh
# A round of a node, by curl:
#
#     POC_CALLBACK_SECRET=secret python3 receiver.py 9000 &        # or: node receiver.mjs 9000
#     NODE=http://localhost:8000 MODEL=trained sh round.sh
#
# Below each call is what a vLLM answered on a CPU, shortened by "…". docs/api/node.openapi.json has
# every field. A node with keys wants POC_API_KEY.
set -eu
P=${NODE:-http://localhost:8000}/api/v1/pow
MODEL=${MODEL:-trained} RECEIVER=${RECEIVER:-http://localhost:9000}

call() {
  curl --silent --show-error --fail-with-body -H "Authorization: Bearer ${POC_API_KEY:-none}" \
    -H "Content-Type: application/json" "$@"
  echo
}

work='"block_hash": "0xabc", "block_height": 100, "public_key": "node-1", "node_id": 0,
  "node_count": 1, "params": {"model": "'$MODEL'", "seq_len": 64}'

# Which weights does it serve, and with which key does it sign its answers?
call "$P/versions"
# {"vllm_version": "0.32.0", "weights_digest": "d5644de1…", "public_key": "51aeb5b1…",
#  "versions": {"vllm": "0.32.0", "…": "…"}, "…": "…"}

# Prove nonce after nonce of this block, until /stop; send the vectors to the receiver.
call "$P/init/generate" -d "{$work, \"url\": \"$RECEIVER\"}"
# {"status": "OK", "pow_status": {"status": "GENERATING"}}

# Wait for the first results.
until call "$P/results?limit=2" | grep vector_b64; do sleep 1; done
# {"results": [{"seq": 1, "round_id": "3ef888d7-…", "nonce": 0,
#               "vector_b64": "+zMTNVMueyfxteItrrdfqYK2PzMpMUA3"}, "…"], "next_after": 2}

call "$P/status"
# {"status": "GENERATING", "round_id": "3ef888d7-…", "config": {"block_hash": "0xabc", "…": "…"},
#  "stats": {"total_processed": 384, "total_found": 384, "nonces_per_second": 274.2, "failed": 0,
#            "…": "…"},
#  "outbox": {"results": 384, "pending": 0, "delivered": 0, "…": "…"}, "error": null, "…": "…"}

call -X POST "$P/stop"
# {"status": "OK", "pow_status": {"status": "STOPPED"}}

# Nonces of your own choice, whose vectors are the answer. A validator asks for these.
call "$P/generate" -d "{$work, \"nonces\": [7, 8], \"wait\": true}"
# {"status": "completed", "request_id": "3566a6dd-…", "block_hash": "0xabc", "block_height": 100,
#  "public_key": "node-1", "artifacts": [
#    {"nonce": 7, "vector_b64": "ZjQnM/S1J7dutTWu164dL2+sZTiJryo0"},
#    {"nonce": 8, "vector_b64": "bS3GtYAobrp+sB6se7DkMLuxJLSNoh0z"}],
#  "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"}}

# What came to the receiver: sqlite3 callbacks.sqlite "SELECT endpoint, body FROM callbacks"
