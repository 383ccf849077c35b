"""What a machine has for serving, proving and verifying."""
