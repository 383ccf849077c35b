"""Commands about the machine that they run on."""
