"""``proofserve bench``: the speed of proofs and of receipts, and their cost for chat."""
