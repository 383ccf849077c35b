"""Long trials of a whole deployment on one machine: random kills of servers, hours of load."""
