"""Training: data, noise, loss, loop."""
