"""What an operator asks about a host before anything is started there."""
