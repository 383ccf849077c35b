"""How fast proofs are, and what they cost chat."""
