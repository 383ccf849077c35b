"""Every vetted version of vLLM on each of its model runners, live on this machine's CPU."""
