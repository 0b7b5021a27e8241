"""The training loop and what it alone needs."""
