"""Every family of models and every format of weights, live on this machine's CPU."""
