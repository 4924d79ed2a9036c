"""trainer: train a speculative-decoding drafter from a cache of hidden states."""
