"""Long trials of a whole deployment on one machine: servers killed at random, hours of load."""
