"""What a verdict costs: passes of weights and forwards, and how fast this machine is."""
